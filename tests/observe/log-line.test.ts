import { expect, test } from "bun:test";
import { LogLine, type LogLineOptions } from "../../src/observe/log-line.ts";
import type { StepReport } from "../../src/observe/step-report.ts";
import { step } from "./step.ts";

function logger(options: Partial<LogLineOptions> = {}): { log: LogLine; lines: string[] } {
	const lines: string[] = [];
	const log = new LogLine({
		logInterval: 1,
		trainIterations: 20,
		flopsPerStep: null,
		worldSize: 1,
		caution: null,
		width: null,
		write: (line) => lines.push(line),
		now: () => new Date(2026, 0, 31, 9, 5, 7, 123),
		...options,
	});
	return { log, lines };
}

/** The lines of some steps. */
function lines(reports: readonly StepReport[], options: Partial<LogLineOptions> = {}): string[] {
	const { log, lines } = logger(options);
	for (const report of reports) log.step(report);
	return lines;
}

test("the line is Megatron's, character by character", () => {
	const losses = { "lm loss": 12.18735, seq_load_balancing_loss: 1.147084 };
	expect(lines([step({ iteration: 1, losses })])).toEqual([
		" [2026-01-31 09:05:07.123000] iteration        1/      20 | consumed samples:            8 |" +
			" elapsed time per iteration (ms): 500.0 | learning rate: 1.951546E-04 | global batch size:     8 |" +
			" lm loss: 1.218735E+01 | seq_load_balancing_loss: 1.147084E+00 | loss scale: 1.0 | grad norm: 5.616 |" +
			" number of skipped iterations:   0 | number of nan iterations:   0 |",
	]);
});

test("optional fields are in Megatron's order", () => {
	const report = step({ iteration: 1, skippedSamples: 16, numZeros: 1234, paramsNorm: 56.7891, seconds: 2 });
	const [line] = lines([report], { flopsPerStep: 6.437265e14, worldSize: 8 });
	expect(line).toBe(
		" [2026-01-31 09:05:07.123000] iteration        1/      20 | consumed samples:            8 |" +
			" skipped samples:           16 | elapsed time per iteration (ms): 2000.0 |" +
			" throughput per GPU (TFLOP/s/GPU): 40.2 | learning rate: 1.951546E-04 | global batch size:     8 |" +
			" lm loss: 1.200000E+01 | loss scale: 1.0 | grad norm: 5.616 | num zeros: 1234.0 | params norm: 56.789 |" +
			" number of skipped iterations:   0 | number of nan iterations:   0 |",
	);
});

test("padding is the mean of the line's steps, after Megatron's fields", () => {
	const reports = [0.5, 0.01, 0.02].map((padding, i) => step({ iteration: i + 1, padding }));
	const written = lines(reports, { logInterval: 3 });
	expect(written.map((line) => /nan iterations: +0 \| padding: ([0-9.]+) % \|/.exec(line)?.[1])).toEqual([
		"50.00",
		"1.50",
	]);
});

/** Regular expressions of the kind that Megatron's own tools read its logs with. */
const megatron = {
	iteration: /iteration\s+([0-9]+)\/\s*([0-9]+) \|/,
	samples: /consumed samples:\s+([0-9]+) \|/,
	elapsed: /elapsed time per iteration \(ms\): ([0-9.]+)/,
	throughput: /throughput per GPU \(TFLOP\/s\/GPU\): ([0-9.]+)/,
	learningRate: /learning rate: ([0-9.E+-]+)/,
	loss: /lm loss: ([0-9.E+-]+)/,
	gradNorm: /grad norm: ([0-9.]+)/,
	numZeros: /num zeros: ([0-9.]+)/,
	skipped: /number of skipped iterations:\s+([0-9]+)/,
	nan: /number of nan iterations:\s+([0-9]+)/,
} as const;

function read(line: string, name: keyof typeof megatron): number {
	return Number(megatron[name].exec(line)?.[1]);
}

test("Megatron's tools read the reported values from the line", () => {
	const report = step({ iteration: 1, losses: { "lm loss": 3.25 }, numZeros: 7, gradNorm: 0.25 });
	const [line] = lines([report], { flopsPerStep: 5e12 });
	expect((Object.keys(megatron) as (keyof typeof megatron)[]).map((name) => read(line!, name))).toEqual([
		1, 8, 500, 10, 1.951546e-4, 3.25, 0.25, 7, 0, 0,
	]);
});

test("every line is the mean of its own steps, the second of a process too", () => {
	const reports = [10, 20, 40, 80].map((loss, i) =>
		step({ iteration: i + 1, losses: { "lm loss": loss }, seconds: loss / 1000, gradNorm: loss }),
	);
	const written = lines(reports);
	expect(written.map((line) => read(line, "loss"))).toEqual([10, 20, 40, 80]);
	expect(written.map((line) => read(line, "elapsed"))).toEqual([10, 20, 40, 80]);
	expect(written.map((line) => read(line, "gradNorm"))).toEqual([10, 20, 40, 80]);
});

test("a longer interval prints after the first step and at its multiples, with means since the last line", () => {
	const reports = Array.from({ length: 8 }, (_, i) => step({ iteration: i + 1, losses: { "lm loss": i + 1 } }));
	const written = lines(reports, { logInterval: 4 });
	expect(written.map((line) => read(line, "iteration"))).toEqual([1, 4, 8]);
	expect(written.map((line) => read(line, "loss"))).toEqual([1, 3, 6.5]);
});

test("a process that resumes at step 5 prints its first step too", () => {
	const written = lines([step({ iteration: 5 }), step({ iteration: 6 })], { logInterval: 10 });
	expect(written.map((line) => read(line, "iteration"))).toEqual([5]);
});

test("NaN and negative losses leave the line, zero stays", () => {
	const [line] = lines([step({ iteration: 1, losses: { "lm loss": Number.NaN, z_loss: -1, load_balancing_loss: 0 } })]);
	expect(line).not.toContain("lm loss");
	expect(line).not.toContain("z_loss");
	expect(line).toContain(" load_balancing_loss: 0.000000E+00 |");
	expect(read(line!, "nan")).toBe(0);
});

test("skipped steps have no gradient norm, count, and leave the means alone", () => {
	const bad = { "lm loss": Number.NaN };
	const written = lines([
		step({ iteration: 1 }),
		step({ iteration: 2 }),
		step({ iteration: 3, skipped: true, gradNorm: null, losses: bad }),
		step({ iteration: 4, losses: { "lm loss": 2 } }),
	]);
	expect(written[2]).not.toContain("grad norm");
	expect(read(written[2]!, "skipped")).toBe(1);
	expect(read(written[2]!, "nan")).toBe(1);
	expect(read(written[3]!, "skipped")).toBe(0);
	expect(read(written[3]!, "loss")).toBe(2);
});

test("an evaluation is framed by rules", () => {
	const { log, lines } = logger();
	log.evaluation({ iteration: 100, split: "validation", label: "iteration 100", losses: { "lm loss": 1 } });
	const line = " validation loss at iteration 100 | lm loss value: 1.000000E+00 | lm loss PPL: 2.718282E+00 | ";
	expect(lines).toEqual(["-".repeat(line.length + 1), line, "-".repeat(line.length + 1)]);
	log.evaluation({ iteration: 1, split: "test", label: "iteration 1 on test set", losses: { "lm loss": 50 } });
	expect(lines[4]).toContain("iteration 1 on test set | lm loss value: 5.000000E+01 | lm loss PPL: 4.851652E+08 |");
});

test("after Megatron's fields: each module's parts, rate and idle share, as means since the last line", () => {
	const module = (compute: number) => ({
		name: "language",
		ranks: 2,
		seconds: { compute, bridge: 0, wait: 0.1, gradients: 0, optimizer: 0, data: 0, other: 0 },
		flops: 4e11,
		idle: 0.25,
		slowest: { rank: 1, busy: 0.2 },
	});
	const reports = [1, 2].map((iteration) => step({ iteration, modules: [module(iteration / 10)] }));
	expect(lines(reports, { logInterval: 2 })[1]).toEndWith(
		" number of nan iterations:   0 | language (ms): compute 200.0 wait 100.0 | language TFLOP/s a rank: 0.667 | language idle: 25.0 % |",
	);
});

test("a caution is in every line and in every evaluation", () => {
	const { log, lines } = logger({ caution: "benchmark: moe-router-force-load-balancing" });
	log.step(step({ iteration: 1 }));
	log.step(step({ iteration: 2 }));
	log.evaluation({ iteration: 2, split: "validation", label: "iteration 2", losses: { "lm loss": 2 } });
	for (const line of [lines[0], lines[1], lines[3]]) {
		expect(line).toContain("| benchmark: moe-router-force-load-balancing |");
	}
});
