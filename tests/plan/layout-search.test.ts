/** Layouts that `mimo plan --split` tries, and their order. */
import { expect, setDefaultTimeout, test } from "bun:test";
import { withoutCuts } from "../../src/config/hybrid-pattern.ts";
import { configurationOf, resolveConfiguration } from "../../src/config/resolve.ts";
import { acceleratorRates } from "../../src/plan/accelerators.ts";
import { balancedCuts, kindOf, layoutCheck, layouts } from "../../src/plan/layout-candidates.ts";
import { rankSplits } from "../../src/plan/layout-search.ts";
import { type Machine, planRun } from "../../src/plan/run-plan.ts";
import { randomValues } from "../support.ts";

// Hundreds of thousands of operations are counted one by one, on a machine that others use too.
setDefaultTimeout(60_000);

const machine: Machine = {
	rates: acceleratorRates("h200").rates,
	kind: "cuda",
	memoryBytes: null,
	ranksPerHost: 8,
	imbalance: 1,
};
const preset = "nemotron-vlm-tiny";
const resolved = resolveConfiguration(["--preset", preset], {}, { trains: false });

test("four devices: both modules together and apart, in one piece, in a pipeline and with virtual stages", () => {
	const check = layoutCheck(resolved);
	const all = [...layouts(resolved, 4)].flatMap(({ layout, kind }) => {
		const configuration = check(layout);
		return configuration === null ? [] : [{ layout, kind, configuration }];
	});
	for (const { kind, configuration } of all) expect(kindOf(configuration)).toEqual(kind);
	const kinds = new Set(
		all.map(({ configuration }) => kindOf(configuration)).map((one) => Object.values(one).join(" ")),
	);
	for (const kind of [
		"colocated 1 1",
		"disjoint 1 1",
		"colocated 2 1",
		"disjoint 2 1",
		"colocated 2 2",
		"disjoint 2 2",
	]) {
		expect(kinds).toContain(kind);
	}
	// No layout comes twice; no layer is lost.
	expect(new Set(all.map(({ layout }) => JSON.stringify(layout))).size).toBe(all.length);
	for (const { configuration: c } of all) expect(withoutCuts(c.hybridLayerPattern)).toBe("ME*-ME");
});

test("most tokens a second first; what does not fit comes last, or recomputes its layers", async () => {
	const { splits: roomy } = await rankSplits(resolved, 2, machine);
	expect(roomy.length).toBeGreaterThan(5);
	const rates = roomy.map(({ tokensPerSecond }) => tokensPerSecond);
	expect(rates).toEqual(rates.toSorted((a, b) => b - a));
	for (const { kind, encoderRanks, languageRanks, communication } of roomy) {
		expect(kind.modules === "colocated" ? languageRanks : encoderRanks + languageRanks).toBeLessThanOrEqual(2);
		expect(communication.bytes > 0).toBe(languageRanks > 1 || kind.modules === "disjoint");
	}
	// A layout's own plan gives the same time.
	const [best] = roomy;
	const c = configurationOf({ preset, ...best!.layout });
	expect((await planRun(c, machine)).step.seconds).toBeCloseTo(best!.step.seconds, 12);
	const memoryBytes = Math.min(...roomy.map(({ peak }) => peak)) * 0.9;
	const { splits: tight } = await rankSplits(resolved, 2, { ...machine, memoryBytes });
	const fitting = tight.filter(({ peak }) => peak <= memoryBytes);
	expect(fitting.length).toBeGreaterThan(0);
	expect(tight.slice(0, fitting.length)).toEqual(fitting);
	for (const { layout } of fitting) expect(layout["recompute-granularity"]).toBe("full");
	expect(tight[fitting.length]!.reason).toStartWith("needs ");
});

test("cuts are those whose largest piece is least", () => {
	const numbers = randomValues(400, 3).map((value) => 1 + Math.round(8 * Math.abs(value)));
	for (let at = 0; at + 9 <= 396; at += 9) {
		const work = [...numbers.slice(at, at + 9)];
		const largest = (ends: readonly number[]) =>
			Math.max(...ends.map((end, i) => work.slice(ends[i - 1] ?? 0, end).reduce((sum, one) => sum + one, 0)));
		for (const pieces of [1, 2, 3]) {
			const ends = balancedCuts(work, pieces);
			expect([ends.length, ends.at(-1)]).toEqual([pieces, 9]);
			const tried: number[][] = [];
			for (let a = 1; a < 9; a++) {
				if (pieces === 1) tried.push([9]);
				else if (pieces === 2) tried.push([a, 9]);
				else for (let b = a + 1; b < 9; b++) tried.push([a, b, 9]);
			}
			expect(largest(ends)).toBe(Math.min(...tried.map(largest)));
		}
	}
});
