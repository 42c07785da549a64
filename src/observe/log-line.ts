/**
 * Megatron's training line, its accumulators and its evaluation block (docs/spec/runtime.md §6.2, §12.1). Losses and
 * time are means since the last line, also since the one after a process's first step, which Megatron's line counts
 * twice. The JSON log has every step on its own. After Megatron's fields come those of each module.
 */

import { counted } from "../system/counted.ts";
import { cutTo } from "./progress.ts";
import type { EvaluationReport, Observer, StepReport, TimersReport } from "./step-report.ts";
import { fixed, formatTimers, pythonFloat, scientific } from "./timers.ts";

export interface LogLineOptions {
	readonly logInterval: number;
	readonly trainIterations: number;
	/** Floating-point operations of a step by Megatron's count; null leaves the throughput out. */
	readonly flopsPerStep: number | null;
	/** Number of devices of the job. */
	readonly worldSize: number;
	/** A warning that the run is not ordinary training, such as a run with benchmark routing; every line has it. */
	readonly caution: string | null;
	/** Columns that a line may have on a terminal, where it is short; null: Megatron's line, whatever its length. */
	readonly width: (() => number) | null;
	readonly write: (line: string) => void;
	readonly now: () => Date;
}

/** "2026-01-31 09:05:07.123456": local time, microseconds. */
export function timestamp(date: Date): string {
	const two = (value: number) => String(value).padStart(2, "0");
	const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
	const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
	return `${day} ${time}.${String(date.getMilliseconds()).padStart(3, "0")}000`;
}

/** Sums over a module's steps since the previous line. */
interface ModuleSums {
	readonly ranks: number;
	readonly seconds: Map<string, number>;
	flops: number;
	idle: number;
	steps: number;
}

export class LogLine implements Observer {
	readonly #options: LogLineOptions;
	/** For every loss, its sum and the number of steps with the loss. */
	readonly #sums = new Map<string, { sum: number; steps: number }>();
	readonly #modules = new Map<string, ModuleSums>();
	#advanced = 0;
	#skipped = 0;
	#nan = 0;
	#seconds = 0;
	/** Sum of the padding, and the number of steps with padding. */
	#padding = { sum: 0, steps: 0 };
	#first = true;

	constructor(options: LogLineOptions) {
		this.#options = options;
	}

	step(report: StepReport): void {
		this.#accumulate(report);
		if (!this.#first && report.iteration % this.#options.logInterval !== 0) return;
		const { width, write } = this.#options;
		write(width === null ? this.#line(report) : this.#shortLine(report, width()));
		this.#reset();
		this.#first = false;
	}

	evaluation({ label, losses }: EvaluationReport): void {
		if (this.#options.width !== null) {
			const values = Object.entries(losses).map(([name, loss]) => `${name} ${shortNumber(loss)}`);
			this.#options.write(fitting([`validation at ${label}`, ...values], this.#options.width()));
			return;
		}
		const parts = Object.entries(losses).map(
			([name, loss]) =>
				` ${name} value: ${scientific(loss, 6)} | ${name} PPL: ${scientific(Math.exp(Math.min(20, loss)), 6)} |`,
		);
		const { caution } = this.#options;
		const line = ` validation loss at ${label} |${parts.join("")}${caution === null ? "" : ` ${caution} |`} `;
		const rule = "-".repeat(line.length + 1);
		for (const text of [rule, line, rule]) this.#options.write(text);
	}

	timers(report: TimersReport): void {
		const text = formatTimers(report);
		if (text !== null) this.#options.write(text);
	}

	note(sentence: string): void {
		this.#options.write(sentence);
	}

	close(): void {}

	#accumulate(report: StepReport): void {
		this.#seconds += report.seconds;
		if (report.padding !== undefined) {
			this.#padding = { sum: this.#padding.sum + report.padding, steps: this.#padding.steps + 1 };
		}
		for (const { name, ranks, seconds, flops, idle } of report.modules ?? []) {
			const sums = this.#modules.get(name) ?? { ranks, seconds: new Map(), flops: 0, idle: 0, steps: 0 };
			this.#modules.set(name, sums);
			for (const [part, value] of Object.entries(seconds))
				sums.seconds.set(part, (sums.seconds.get(part) ?? 0) + value);
			sums.flops += flops;
			sums.idle += idle;
			sums.steps++;
		}
		if (report.skipped) {
			this.#skipped++;
			if (Object.values(report.losses).some((loss) => !Number.isFinite(loss))) this.#nan++;
			return;
		}
		this.#advanced++;
		for (const [name, loss] of Object.entries(report.losses)) {
			const { sum, steps } = this.#sums.get(name) ?? { sum: 0, steps: 0 };
			this.#sums.set(name, { sum: sum + loss, steps: steps + 1 });
		}
	}

	#reset(): void {
		this.#advanced = 0;
		this.#skipped = 0;
		this.#nan = 0;
		this.#seconds = 0;
		this.#padding = { sum: 0, steps: 0 };
		this.#modules.clear();
		for (const name of this.#sums.keys()) this.#sums.set(name, { sum: 0, steps: 0 });
	}

	/** The fields that a reader looks for first, as many as fit in a row. */
	#shortLine(report: StepReport, width: number): string {
		const { trainIterations, caution } = this.#options;
		const seconds = this.#seconds / (this.#advanced + this.#skipped);
		const losses = [...this.#sums].flatMap(([name, { sum, steps }]) =>
			steps === 0 ? [] : [`${name} ${shortNumber(sum / steps)}`],
		);
		const fields = [
			`iteration ${String(report.iteration).padStart(String(trainIterations).length)}/${trainIterations}`,
			...(this.#skipped > 0 ? [`${counted(this.#skipped, "update")} skipped`] : []),
			...losses.slice(0, 1),
			...(report.gradNorm === null ? [] : [`grad norm ${shortNumber(report.gradNorm)}`]),
			`learning rate ${shortNumber(report.nextLearningRate)}`,
			`${shortNumber(seconds * 1000)} ms`,
			...losses.slice(1),
			...(caution === null ? [] : [caution]),
		];
		return fitting(fields, width);
	}

	#line(report: StepReport): string {
		const { trainIterations, flopsPerStep, worldSize, caution, now } = this.#options;
		const seconds = this.#seconds / (this.#advanced + this.#skipped);
		const count = (value: number, width: number) => String(value).padStart(width);
		const fields = [
			`[${timestamp(now())}] iteration ${count(report.iteration, 8)}/${count(trainIterations, 8)}`,
			`consumed samples: ${count(report.consumedSamples, 12)}`,
		];
		if (report.skippedSamples > 0) fields.push(`skipped samples: ${count(report.skippedSamples, 12)}`);
		fields.push(`elapsed time per iteration (ms): ${fixed(seconds * 1000, 1)}`);
		if (flopsPerStep !== null) {
			fields.push(`throughput per GPU (TFLOP/s/GPU): ${fixed(flopsPerStep / (seconds * 1e12 * worldSize), 1)}`);
		}
		fields.push(`learning rate: ${scientific(report.nextLearningRate, 6)}`);
		fields.push(`global batch size: ${count(report.globalBatchSize, 5)}`);
		for (const [name, { sum, steps }] of this.#sums) {
			const mean = sum / Math.max(1, steps);
			if (mean >= 0) fields.push(`${name}: ${scientific(mean, 6)}`);
		}
		fields.push(`loss scale: ${fixed(report.lossScale, 1)}`);
		if (report.gradNorm !== null) fields.push(`grad norm: ${fixed(report.gradNorm, 3)}`);
		if (report.numZeros !== null) fields.push(`num zeros: ${pythonFloat(Math.fround(report.numZeros))}`);
		if (report.paramsNorm !== null) fields.push(`params norm: ${fixed(report.paramsNorm, 3)}`);
		fields.push(`number of skipped iterations: ${count(this.#skipped, 3)}`);
		fields.push(`number of nan iterations: ${count(this.#nan, 3)}`);
		const padding = this.#padding;
		if (caution !== null) fields.push(caution);
		if (padding.steps > 0) fields.push(`padding: ${fixed((100 * padding.sum) / padding.steps, 2)} %`);
		for (const [name, sums] of this.#modules) fields.push(...moduleFields(name, sums));
		return fields.map((field) => ` ${field} |`).join("");
	}
}

/** Five digits; "1.23e-4" for a small value. */
export const shortNumber = (value: number): string =>
	value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(5)));

/** As many of the fields as a row of `width` columns has room for; the first one in any case, cut to it. */
export function fitting(fields: readonly string[], width: number): string {
	let row = cutTo(fields[0] ?? "", width);
	for (const field of fields.slice(1)) {
		const longer = `${row} | ${field}`;
		if (Bun.stringWidth(longer) <= width) row = longer;
	}
	return row;
}

/** Fields after Megatron's: means over a module's ranks. */
function moduleFields(name: string, { ranks, seconds, flops, idle, steps }: ModuleSums): string[] {
	const parts = [...seconds]
		.filter(([, sum]) => sum > 0)
		.map(([part, sum]) => `${part} ${fixed((sum / steps) * 1000, 1)}`);
	const whole = [...seconds.values()].reduce((sum, value) => sum + value, 0);
	const rate = flops / (whole * 1e12 * ranks);
	return [
		`${name} (ms): ${parts.join(" ")}`,
		...(flops > 0 ? [`${name} TFLOP/s a rank: ${rate >= 10 ? fixed(rate, 1) : rate.toPrecision(3)}`] : []),
		`${name} idle: ${fixed((100 * idle) / steps, 1)} %`,
	];
}
