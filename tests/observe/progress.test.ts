import { expect, test } from "bun:test";
import { openObserver } from "../../src/observe/observer.ts";
import { duration, ProgressLine, Terminal } from "../../src/observe/progress.ts";
import { RunRecords } from "../../src/observe/run-records.ts";
import { step } from "./step.ts";

const clear = "\r\u001b[2K";

function screen(isTTY: boolean) {
	const written: string[] = [];
	return { isTTY, columns: 60, written, write: (text: string) => written.push(text) };
}

test("where there is no terminal, lines are plain and there is no progress line", () => {
	const output = screen(false);
	const observer = openObserver({
		logInterval: 1,
		trainIterations: 2,
		flopsPerStep: null,
		worldSize: 1,
		caution: null,
		logJson: null,
		tensorBoard: null,
		mlflow: null,
		wandb: null,
		interval: 1,
		records: new RunRecords(() => {}),
		timers: false,
		output,
	});
	observer.note("Hello.");
	observer.step(step({ iteration: 1 }));
	observer.close();
	expect(output.written).toHaveLength(2);
	expect(output.written[0]).toBe("Hello.\n");
	expect(output.written[1]).toMatch(/^ \[.*\n$/);
	expect(output.written.join("")).not.toContain("\u001b");
});

test("on a terminal the progress line stays below the lines and is gone at the end", () => {
	const output = screen(true);
	const terminal = new Terminal(output);
	let clock = 0;
	const progress = new ProgressLine(terminal, 4, () => clock);
	progress.step(step({ iteration: 1 }));
	expect(output.written.at(-1)).toStartWith(`${clear}█████░░░░░░░░░░░░░░░ 1/4  lm loss 12.0000  4,096 tokens/s`);
	clock = 50;
	progress.step(step({ iteration: 2 }));
	expect(output.written).toHaveLength(1);
	terminal.line("A line.");
	expect(output.written.at(-1)).toStartWith(`${clear}A line.\n█`);
	clock = 200;
	progress.step(step({ iteration: 3 }));
	expect(output.written.at(-1)!.replace(clear, "").length).toBeLessThan(60);
	progress.close();
	expect(output.written.at(-1)).toBe(clear);
	terminal.line("After.");
	expect(output.written.at(-1)).toBe("After.\n");
});

test("durations", () => {
	expect([0, 65, 3599.6, 7384].map(duration)).toEqual(["0:00", "1:05", "1:00:00", "2:03:04"]);
});
