/** An elastic run's log: what the router chose for every budget, and the losses, on the page. */
import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { reportPage } from "../../src/observe/page/page.ts";
import { familyEvent } from "../../src/observe/run-log/family.ts";
import { readRunLog } from "../../src/observe/run-log/reader.ts";
import { JsonLog } from "../../src/observe/run-log/writer.ts";
import { Scratch } from "../data/fixtures.ts";
import { step } from "./step.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

test("budgets have their latest sizes and losses, repeated steps count once, and the page shows them", () => {
	const file = join(folder.path, "run.jsonl");
	const log = new JsonLog(file, () => new Date(0));
	log.event({ kind: "start", step: 0, sentence: "new run" });
	const budget = (value: number, iteration: number) => ({
		budget: value,
		sizes: { "hidden-size": 64 * value, "mamba-num-heads": iteration < 20 ? 8 : 8 * value, layers: 6 },
		total: 1e6 * value,
		active: 5e5 * value,
		loss: 4 / value - iteration / 100,
	});
	const train = (first: number, last: number) => {
		for (let iteration = first; iteration <= last; iteration++) {
			log.step(step({ iteration }));
			if (iteration % 10 === 0) log.event(familyEvent(iteration, [budget(1, iteration), budget(0.5, iteration)]));
		}
	};
	train(1, 20);
	// Resumed from step 10.
	train(11, 30);
	log.close();
	const { family, events } = readRunLog(file);
	expect([...family.keys()]).toEqual([1, 0.5]);
	const half = family.get(0.5)!;
	expect([half.total, half.active]).toEqual([5e5, 2.5e5]);
	expect(half.loss.bins.map(({ first, sum }) => [first, sum])).toEqual([
		[10, 7.9],
		[20, 7.8],
		[30, 7.7],
	]);
	expect(half.sizes.get("mamba-num-heads")!.bins.map(({ sum }) => sum)).toEqual([8, 4, 4]);
	expect(events.map(({ kind }) => kind)).toEqual(["start"]);
	const page = reportPage(readRunLog(file), 0);
	expect(page).toContain("<h2>Family of submodels</h2>");
	expect(page).toContain("budget 0.5: 250,000 active parameters, loss 7.7");
	expect(page).toContain("hidden-size by step");
	expect(page).toContain("mamba-num-heads by step");
	// All budgets keep all layers at all times.
	expect(page).not.toContain("layers by step");
	expect(familyEvent(30, [budget(0.5, 30)]).sentence).toBe("budget 0.5: 0.250 M active parameters, loss 7.7000");
});

test("a run that is not elastic has no section about submodels", () => {
	const file = join(folder.path, "plain.jsonl");
	const log = new JsonLog(file);
	log.step(step({ iteration: 1 }));
	log.close();
	expect(reportPage(readRunLog(file), 0)).not.toContain("Family of submodels");
});
