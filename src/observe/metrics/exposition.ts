/**
 * A training's metrics in the text format of Prometheus (https://prometheus.io/docs/instrumenting/exposition_formats/). Counters
 * begin with the process; units are base units.
 */
import type { EvaluationReport, StepReport } from "../step-report.ts";

/** The exposed values of a step's report. */
export interface StepSample
	extends Pick<
		StepReport,
		| "iteration"
		| "consumedSamples"
		| "tokens"
		| "seconds"
		| "learningRate"
		| "losses"
		| "gradNorm"
		| "skipped"
		| "modules"
	> {
	/** The largest of all ranks. */
	readonly memory: { readonly allocated: number; readonly reserved: number; readonly peak: number } | null;
}

export interface RunFacts {
	readonly version: string;
	readonly worldSize: number;
	readonly trainIterations: number;
}

type Labels = Readonly<Record<string, string | number>>;
type Value = readonly [labels: Labels, value: number];

/** An event that changes the metrics. */
export type MetricsEvent =
	| { readonly kind: "step"; readonly sample: StepSample }
	| { readonly kind: "evaluation"; readonly report: Pick<EvaluationReport, "split" | "losses"> }
	| { readonly kind: "start"; readonly restarts: number }
	| { readonly kind: "save" };

export class RunMetrics {
	#last: StepSample | null = null;
	/** Seconds since 1970 of the last step's report. */
	#lastAt = 0;
	/** The largest step so far: one that a restart repeats is not gained again. */
	#furthest = 0;
	#steps = 0;
	#tokens = 0;
	#seconds = 0;
	#productive = 0;
	#skipped = 0;
	#saves = 0;
	#restarts = 0;
	readonly #parts = new Map<string, { readonly labels: Labels; seconds: number }>();
	readonly #evaluations = new Map<string, Value>();

	constructor(
		private readonly facts: RunFacts,
		/** Seconds since 1970. */
		private readonly begun: number,
	) {}

	take(event: MetricsEvent, now: number): void {
		if (event.kind === "step") this.#step(event.sample, now);
		else if (event.kind === "save") this.#saves++;
		else if (event.kind === "start") this.#restarts = event.restarts;
		else {
			const { split, losses } = event.report;
			for (const [loss, value] of Object.entries(losses)) {
				this.#evaluations.set(`${split} ${loss}`, [{ split, loss }, value]);
			}
		}
	}

	#step(sample: StepSample, now: number): void {
		this.#last = sample;
		this.#lastAt = now;
		this.#steps++;
		this.#tokens += sample.tokens;
		this.#seconds += sample.seconds;
		if (sample.skipped) this.#skipped++;
		else if (sample.iteration > this.#furthest) this.#productive += sample.seconds;
		this.#furthest = Math.max(this.#furthest, sample.iteration);
		for (const { name, seconds } of sample.modules ?? []) {
			for (const [part, value] of Object.entries(seconds)) {
				const key = `${name} ${part}`;
				const sum = this.#parts.get(key) ?? { labels: { module: name, part }, seconds: 0 };
				this.#parts.set(key, sum);
				sum.seconds += value;
			}
		}
	}

	/** The text; `now`: seconds since 1970. */
	text(now: number): string {
		const { version, worldSize, trainIterations } = this.facts;
		const last = this.#last;
		const uptime = now - this.begun;
		const lines: string[] = [];
		const family = (
			type: "gauge" | "counter",
			name: string,
			help: string,
			values: readonly Value[] | number | null,
		) => {
			const all: readonly Value[] = typeof values === "number" ? [[{}, values]] : (values ?? []);
			if (all.length === 0) return;
			lines.push(`# HELP mimo_${name} ${help}`, `# TYPE mimo_${name} ${type}`);
			for (const [labels, value] of all) lines.push(`mimo_${name}${labelText(labels)} ${numberText(value)}`);
		};
		const modules = last?.modules ?? [];
		family("gauge", "build_info", "Version of the program.", [[{ version }, 1]]);
		family("gauge", "ranks", "Ranks of the run.", worldSize);
		family("gauge", "train_steps", "Steps that the training will have.", trainIterations);
		family("gauge", "step", "Step that was finished last.", last?.iteration ?? null);
		family("gauge", "last_step_timestamp_seconds", "When a step was finished last.", last && this.#lastAt);
		family("counter", "steps_total", "Steps that this process has finished.", this.#steps);
		family("counter", "skipped_steps_total", "Steps whose update was skipped.", this.#skipped);
		family("counter", "tokens_total", "Tokens of the steps.", this.#tokens);
		family("gauge", "consumed_samples", "Samples of the training so far.", last?.consumedSamples ?? null);
		family(
			"gauge",
			"loss",
			"Losses of the last step.",
			Object.entries(last?.losses ?? {}).map(([loss, value]) => [{ loss }, value]),
		);
		family("gauge", "evaluation_loss", "Losses of the last evaluation.", [...this.#evaluations.values()]);
		family(
			"gauge",
			"gradient_norm",
			"Norm of the gradient before clipping; absent where the step was skipped.",
			last?.gradNorm ?? null,
		);
		family("gauge", "learning_rate", "Learning rate of the last step.", last?.learningRate ?? null);
		family("gauge", "step_seconds", "Seconds of the last step, without saving and evaluation.", last?.seconds ?? null);
		family("counter", "step_seconds_total", "Seconds of all steps.", this.#seconds);
		family("gauge", "tokens_per_second", "Tokens of the last step by its seconds.", last && last.tokens / last.seconds);
		family(
			"counter",
			"module_seconds_total",
			"Seconds of the steps by module and part, mean of the module's ranks.",
			[...this.#parts.values()].map(({ labels, seconds }) => [labels, seconds]),
		);
		family(
			"gauge",
			"module_idle_ratio",
			"Share of the last step in which the module's ranks waited.",
			modules.map(({ name, idle }) => [{ module: name }, idle]),
		);
		family(
			"gauge",
			"module_flops_per_second",
			"Operations a second of one of the module's ranks in the last step.",
			modules
				.filter(({ flops }) => flops > 0)
				.map(({ name, flops, ranks, seconds }) => [
					{ module: name },
					flops / ranks / Object.values(seconds).reduce((sum, value) => sum + value, 0),
				]),
		);
		family(
			"gauge",
			"module_slowest_rank",
			"The module's slowest rank in the last step.",
			modules.map(({ name, slowest }) => [{ module: name }, slowest.rank]),
		);
		family(
			"gauge",
			"device_memory_bytes",
			"Device memory of the rank that has most.",
			Object.entries(last?.memory ?? {}).map(([kind, value]) => [{ kind }, value]),
		);
		family("counter", "saves_total", "Checkpoints that this process has saved.", this.#saves);
		family("counter", "restarts_total", "Restarts of the run after failures.", this.#restarts);
		family("counter", "uptime_seconds_total", "Seconds since this process began to train.", uptime);
		family(
			"counter",
			"productive_seconds_total",
			"Seconds of steps that brought the training forward.",
			this.#productive,
		);
		family(
			"gauge",
			"goodput_ratio",
			"Productive seconds by seconds since this process began.",
			uptime > 0 ? this.#productive / uptime : 0,
		);
		return `${lines.join("\n")}\n`;
	}
}

function labelText(labels: Labels): string {
	const pairs = Object.entries(labels).map(([name, value]) => {
		const escaped = String(value).replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n");
		return `${name}="${escaped}"`;
	});
	return pairs.length === 0 ? "" : `{${pairs.join(",")}}`;
}

function numberText(value: number): string {
	return Number.isNaN(value) ? "NaN" : value === Infinity ? "+Inf" : value === -Infinity ? "-Inf" : String(value);
}
