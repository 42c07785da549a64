/**
 * A progress line below all other output of a terminal. Output that is not a terminal has no progress line, and its other lines
 * are unchanged.
 */
import type { EvaluationReport, Observer, StepReport } from "./step-report.ts";

export interface TerminalStream {
	readonly isTTY?: boolean;
	readonly columns?: number;
	write(text: string): unknown;
}

/** Milliseconds between updates of the progress line. */
const drawingInterval = 100;
const clearLine = "\r\u001b[2K";

/** Writes whole lines, and redraws the progress line below them. */
export class Terminal {
	#progress = "";

	constructor(private readonly stream: TerminalStream) {}

	get interactive(): boolean {
		return this.stream.isTTY === true;
	}

	line(text: string): void {
		this.stream.write(this.#progress === "" ? `${text}\n` : `${clearLine}${text}\n${this.#progress}`);
	}

	/** Replaces the progress line; "" removes it. */
	progress(text: string): void {
		if (!this.interactive) return;
		const fitted = text.slice(0, Math.max(0, (this.stream.columns || 80) - 1));
		if (fitted === this.#progress) return;
		this.stream.write(`${clearLine}${fitted}`);
		this.#progress = fitted;
	}
}

/** "1:05", "2:03:04". */
export function duration(seconds: number): string {
	const whole = Math.round(seconds);
	const two = (value: number) => String(value).padStart(2, "0");
	const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
	return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export class ProgressLine implements Observer {
	#drawn = Number.NEGATIVE_INFINITY;
	#seconds = 0;
	#steps = 0;

	constructor(
		private readonly terminal: Terminal,
		private readonly trainIterations: number,
		private readonly now: () => number = () => performance.now(),
	) {}

	step(report: StepReport): void {
		this.#seconds += report.seconds;
		this.#steps++;
		const at = this.now();
		if (at - this.#drawn < drawingInterval && report.iteration !== this.trainIterations) return;
		this.#drawn = at;
		const done = report.iteration / this.trainIterations;
		const bar = "█".repeat(Math.floor(done * 20)).padEnd(20, "░");
		const losses = Object.entries(report.losses).slice(0, 1);
		const left = ((this.trainIterations - report.iteration) * this.#seconds) / this.#steps;
		const parts = [
			`${bar} ${report.iteration}/${this.trainIterations}`,
			...losses.map(([name, loss]) => `${name} ${loss.toFixed(4)}`),
			`${Math.round(report.tokens / report.seconds).toLocaleString("en")} tokens/s`,
			`${duration(left)} left`,
		];
		this.terminal.progress(parts.join("  "));
	}

	evaluation(_report: EvaluationReport): void {}

	note(): void {}

	close(): void {
		this.terminal.progress("");
	}
}
