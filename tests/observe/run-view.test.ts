/** The view of a run on a terminal: what its rows say, and how it ends. */
import { expect, test } from "bun:test";
import { openObserver } from "../../src/observe/observer.ts";
import { Terminal, type TerminalStream } from "../../src/observe/progress.ts";
import { RunRecords } from "../../src/observe/run-records.ts";
import { curve, RunView } from "../../src/observe/run-view.ts";
import { Screen } from "./screen.ts";
import { step } from "./step.ts";

/** A view of 40 steps on a screen, and the clock that it reads. */
function viewOn(screen: Screen) {
	const clock = { now: 0 };
	const terminal = new Terminal(screen);
	const view = new RunView(terminal, { trainIterations: 40, colours: false, now: () => clock.now });
	const train = (from: number, to: number) => {
		for (let iteration = from; iteration <= to; iteration++) {
			clock.now += 500;
			view.step(step({ iteration, losses: { "lm loss": 8 * 0.9 ** iteration } }));
		}
	};
	return { clock, terminal, view, train };
}

test("the view shows progress, curve, losses, speed, memory and the last notices", () => {
	const screen = new Screen(100, 30);
	const { view, train } = viewOn(screen);
	view.note("Said before the first step.");
	train(1, 19);
	view.note("Skipped \u001b[31msample\u001b[0m a\nb.");
	view.evaluation({ iteration: 19, split: "validation", label: "iteration 19", losses: { "lm loss": 1.25 } });
	train(20, 21);
	const [empty, bar, ...rest] = screen.text;
	expect(empty).toBe("");
	expect(bar).toBe("████████████░░░░░░░░░░░░  21/40  52 %  0:11 gone  0:10 left");
	expect(rest.slice(1, 5).map((row) => row.slice(0, 9))).toEqual(["     7.2 ", "         ", "         ", " 0.87535 "]);
	expect(rest[0]).toBe("lm loss 0.87535 | validation 1.25 | 4,096 tokens/s | 500 ms a step | grad norm 5.6161");
	expect(rest.slice(5)).toEqual(["step 19: Skipped sample a b."]);
});

test("the rank with the most memory is named", () => {
	const screen = new Screen(100, 30);
	const { view } = viewOn(screen);
	const memory = [1, 3].map((peak) => ({ allocated: 0, reserved: 0, peak: peak * 2 ** 30 }));
	view.step(step({ iteration: 1, memory }));
	expect(screen.text.join("\n")).toContain("| memory 3.0 GiB (rank 1) |");
});

test("no row is wider than the terminal, whose size may change, and a low one has the bar alone", () => {
	const screen = new Screen(100, 30);
	const { train } = viewOn(screen);
	train(1, 10);
	screen.columns = 32;
	train(11, 20);
	for (const row of screen.text) expect(Bun.stringWidth(row)).toBeLessThan(32);
	expect(screen.text).toHaveLength(7);
	screen.rows = 8;
	train(21, 21);
	expect(screen.text).toEqual(["", expect.stringContaining("21/40")]);
});

test("steps within a tenth of a second are drawn once, the last step in any case", () => {
	const screen = new Screen(100, 30);
	const { view } = viewOn(screen);
	view.step(step({ iteration: 38 }));
	screen.written = "";
	view.step(step({ iteration: 39 }));
	expect(screen.written).toBe("");
	view.step(step({ iteration: 40 }));
	expect(screen.text[1]).toContain("40/40  100 %");
});

test.each(["end", "stop", "failure"] as const)("at the %s the last state stays above what is said then", (kind) => {
	const screen = new Screen(100, 30);
	const { terminal, view, train } = viewOn(screen);
	train(1, 12);
	view.note("A notice.");
	view.event({ kind, step: 12, sentence: "" });
	terminal.line("Trained 12 steps.");
	train(13, 13);
	view.close();
	expect(screen.text).toHaveLength(8);
	expect(screen.text[1]).toContain("12/40");
	expect(screen.text.at(-1)).toBe("Trained 12 steps.");
	expect(screen.cursor).toEqual({ row: 8, column: 0 });
});

test("the curve's heights are the logarithms of positive values", () => {
	expect(curve([1, 10, 100], 1)).toEqual(["▁▅█"]);
	expect(curve([-1, 0, 1], 1)).toEqual(["▁▅█"]);
	expect(curve([1, 8], 2)).toEqual([" █", "▁█"]);
	expect(curve([3, 3], 1)).toEqual(["▁▁"]);
});

/** The observer of a run whose output is `output`. */
function observerOn(output: TerminalStream, view = true) {
	return openObserver({
		...{ logInterval: 1, trainIterations: 2, flopsPerStep: null, worldSize: 1, caution: null, interval: 1 },
		...{ logJson: null, tensorBoard: null, trackers: null, metrics: null, timers: false, view, output },
		records: new RunRecords(() => {}),
	});
}

test("a run on a terminal has lines of one row above the view", () => {
	const screen = new Screen(60, 30);
	const observer = observerOn(screen);
	observer.note("Hello.");
	observer.step(step({ iteration: 1 }));
	observer.evaluation({ iteration: 1, split: "validation", label: "iteration 1", losses: { "lm loss": 1.25 } });
	observer.step(step({ iteration: 2 }));
	expect(screen.text.slice(0, 5)).toEqual([
		"Hello.",
		"iteration 1/2 | lm loss 12 | grad norm 5.6161 | 500 ms",
		"validation at iteration 1 | lm loss 1.25",
		"iteration 2/2 | lm loss 12 | grad norm 5.6161 | 500 ms",
		"",
	]);
	observer.close();
});

test.each([
	["a file or a pipe", false, true],
	["a terminal without the view", true, false],
])("%s gets Megatron's lines alone", (_, isTTY, view) => {
	const written: string[] = [];
	const observer = observerOn({ isTTY, columns: 60, write: (text) => written.push(text) }, view);
	observer.note("Hello.");
	observer.step(step({ iteration: 1 }));
	observer.close();
	expect(written).toHaveLength(2);
	expect(written[0]).toBe("Hello.\n");
	expect(written[1]).toMatch(/^ \[.* number of nan iterations: {3}0 \|\n$/);
	expect(written.join("")).not.toContain("\u001b");
});
