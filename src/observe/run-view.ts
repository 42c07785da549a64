/**
 * A training on a terminal: progress, curve of the loss, speed, memory, time left and the last notices, in a block that is drawn
 * anew with the steps. A low terminal has the row of the progress alone.
 */
import { fitting, shortNumber } from "./log-line.ts";
import { bytesText } from "./output.ts";
import { cutTo, duration, type Terminal } from "./progress.ts";
import { type Bin, largestOf, leastOf, Series } from "./series.ts";
import type { EvaluationReport, Observer, RunEvent, StepReport } from "./step-report.ts";

export interface RunViewOptions {
	readonly trainIterations: number;
	/** Whether parts are coloured. */
	readonly colours: boolean;
	/** Milliseconds of a clock. */
	readonly now: () => number;
}

/** Milliseconds between drawings. */
const drawingInterval = 100;
/** Rows of the curve, and rows of a terminal that has room for it. */
const curveRows = 4;
const rowsForAll = 16;
const keptNotices = 2;
/** Weight of a step in the running mean of the speed, once there are enough steps. */
const leastWeight = 0.05;

const levels = " ▁▂▃▄▅▆▇█";

export class RunView implements Observer {
	readonly #loss = new Series();
	readonly #started: number;
	#notices: readonly string[] = [];
	#last: StepReport | null = null;
	#validation: number | null = null;
	/** Means over the steps of this process; the first one, which prepares, counts until there is another. */
	#seconds = 0;
	#tokens = 0;
	#steps = 0;
	#drawn = Number.NEGATIVE_INFINITY;
	#over = false;

	constructor(
		private readonly terminal: Terminal,
		private readonly options: RunViewOptions,
	) {
		this.#started = options.now();
	}

	step(report: StepReport): void {
		this.#last = report;
		this.#steps++;
		const weight = Math.max(leastWeight, 1 / Math.max(1, this.#steps - 1));
		this.#seconds += weight * (report.seconds - this.#seconds);
		this.#tokens += weight * (report.tokens - this.#tokens);
		const loss = Object.values(report.losses)[0];
		if (loss !== undefined && !report.skipped) this.#loss.add(report.iteration, loss);
		const at = this.options.now();
		if (at - this.#drawn < drawingInterval && report.iteration !== this.options.trainIterations) return;
		this.#drawn = at;
		this.#draw();
	}

	evaluation({ losses }: EvaluationReport): void {
		this.#validation = Object.values(losses)[0] ?? null;
		this.#draw();
	}

	note(sentence: string): void {
		if (this.#last === null || this.#over) return;
		// The escape sequences of a file's name are not the view's.
		const text = Bun.stripANSI(sentence).replaceAll(/\p{Cc}+/gu, " ");
		this.#notices = [...this.#notices, `step ${this.#last.iteration}: ${text}`].slice(-keptNotices);
		this.#draw();
	}

	/** The block of a training that has ended stays above the sentences about its end. */
	event({ kind }: RunEvent): void {
		if (kind !== "end" && kind !== "stop" && kind !== "failure") return;
		this.#notices = [];
		this.#draw();
		this.close();
	}

	close(): void {
		this.#over = true;
		this.terminal.release();
	}

	#draw(): void {
		if (this.#last === null || this.#over) return;
		const { width, height } = this.terminal;
		const bar = this.#progress(this.#last);
		// The first row is empty: the cursor rests there, and Ctrl-C is echoed there.
		if (height < rowsForAll) this.terminal.show(["", bar]);
		else {
			const notices = this.#notices.map((text) => this.#style("2", cutTo(text, width)));
			this.terminal.show(["", bar, this.#facts(this.#last, width), ...this.#curve(width), ...notices]);
		}
	}

	#progress({ iteration }: StepReport): string {
		const { trainIterations, now } = this.options;
		const done = iteration / trainIterations;
		const filled = Math.floor(done * 24);
		const bar = this.#style("36", "█".repeat(filled)) + this.#style("2", "░".repeat(24 - filled));
		const left = (trainIterations - iteration) * this.#seconds;
		const times = `${duration((now() - this.#started) / 1000)} gone  ${duration(left)} left`;
		return `${bar}  ${iteration}/${trainIterations}  ${Math.floor(100 * done)} %  ${times}`;
	}

	#facts({ losses, gradNorm, nextLearningRate, memory = [] }: StepReport, width: number): string {
		const peak = largestOf(memory.map((one) => one.peak));
		const fullest = memory.findIndex((one) => one.peak === peak);
		const rank = memory.length > 1 ? ` (rank ${fullest})` : "";
		const facts = [
			...Object.entries(losses)
				.slice(0, 1)
				.map(([name, loss]) => `${name} ${shortNumber(loss)}`),
			...(this.#validation === null ? [] : [`validation ${shortNumber(this.#validation)}`]),
			`${Math.round(this.#tokens / this.#seconds).toLocaleString("en")} tokens/s`,
			`${shortNumber(Number((this.#seconds * 1000).toPrecision(3)))} ms a step`,
			...(memory.length === 0 ? [] : [`memory ${bytesText(peak)}${rank}`]),
			...(gradNorm === null ? [] : [`grad norm ${shortNumber(gradNorm)}`]),
			`learning rate ${shortNumber(nextLearningRate)}`,
		];
		return fitting(facts, width);
	}

	/** The loss over all steps of this process, its largest and least values beside it. */
	#curve(width: number): string[] {
		const { bins } = this.#loss;
		if (bins.length === 0) return [];
		const values = valuesOf(bins, Math.max(1, width - 9));
		const [high, low] = [largestOf(values), leastOf(values)].map(shortNumber);
		return curve(values, curveRows).map((row, i) => {
			const label = i === 0 ? high! : i === curveRows - 1 && low !== high ? low! : "";
			return `${this.#style("2", label.slice(0, 8).padStart(8))} ${this.#style("36", row)}`;
		});
	}

	#style(code: string, text: string): string {
		return this.options.colours && text !== "" ? `\u001b[${code}m${text}\u001b[0m` : text;
	}
}

/** Means of the steps, as many as there are bins, `most` at most. */
function valuesOf(bins: readonly Readonly<Bin>[], most: number): number[] {
	const count = Math.min(most, bins.length);
	return Array.from({ length: count }, (_, i) => {
		const own = bins.slice(Math.floor((i * bins.length) / count), Math.floor(((i + 1) * bins.length) / count));
		return own.reduce((sum, bin) => sum + bin.sum, 0) / own.reduce((sum, bin) => sum + bin.count, 0);
	});
}

/** Rows of block characters whose heights are the values, on a logarithmic scale if all of them are positive. */
export function curve(values: readonly number[], rows: number): string[] {
	const isLog = leastOf(values) > 0;
	const heights = isLog ? values.map(Math.log) : values;
	const [low, high] = [leastOf(heights), largestOf(heights)];
	const steps = 8 * rows - 1;
	const eighths = heights.map((value) => 1 + (high > low ? Math.round(((value - low) / (high - low)) * steps) : 0));
	return Array.from({ length: rows }, (_, row) => {
		const base = 8 * (rows - 1 - row);
		return eighths.map((count) => levels[Math.min(8, Math.max(0, count - base))]).join("");
	});
}
