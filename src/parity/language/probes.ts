/** Compares layers, logits and gradient norms that a reference recorded in step 1 with the parts of all ranks. */
import {
	type Correspondence,
	gatherTensors,
	gradientsOf,
	MappedStore,
	planTensors,
	readTensor,
} from "../../checkpoint/index.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import type { Run } from "../../train/assemble.ts";
import type { MicrobatchObserver } from "../../train/rank-passes.ts";
import type { Check } from "../comparison.ts";
import { type Probe, ProbeSums, reduceHost } from "../probe-sums.ts";
import type { StepWatch } from "../reference.ts";
import type { Plan } from "../verify/samples.ts";

const parameterGradientLimit = 2e-5;

/** Values that a reference recorded inside step 1. */
export interface StepOne {
	/** Samples of one of its microbatches, and tokens of a sample. */
	readonly batch: number;
	readonly seq: number;
	/** By the name that the model observes: the values of each of its microbatches, in order. */
	readonly values: ReadonlyMap<string, readonly Omit<Probe, "name" | "elements">[]>;
	/** Norm of every parameter's gradient by its name there. */
	readonly gradNorm: Readonly<Record<string, number>>;
	/** How the reference names the parameters. */
	readonly names: Correspondence;
	/** A difference of a gradient's norm that rounding makes where the gradient is zero; default 0. */
	readonly gradNormRounding?: number;
	/** Sizes of the language model, where a rank may have no part of it. */
	readonly config?: Pick<HybridConfig, "hiddenSize" | "vocabularySize">;
}

/** Every rank of the run makes one for step 1, observes with it, and calls `checks` together with all others. */
export class LanguageProbes {
	readonly #probes: ProbeSums;
	/** The first of each observed value's probes. */
	readonly #first = new Map<string, number>();
	readonly #gradients: Check[] = [];

	constructor(
		readonly stepOne: StepOne,
		readonly plan: Plan,
		readonly run: Run,
	) {
		const config = stepOne.config ?? run.language!.config;
		const tokens = stepOne.batch * stepOne.seq;
		const probes: Probe[] = [];
		for (const [name, values] of stepOne.values) {
			this.#first.set(name, probes.length);
			const width = isLogits(name) ? config.vocabularySize : config.hiddenSize;
			for (const [microbatch, probe] of values.entries()) {
				const which = values.length > 1 ? `, microbatch ${microbatch + 1}` : "";
				probes.push({ name: `step 1 ${name.replaceAll(".", " ")}${which}`, elements: tokens * width, ...probe });
			}
		}
		this.#probes = new ProbeSums(probes);
	}

	/** Adds this rank's part of a value of step 1. */
	readonly observe: MicrobatchObserver = (name, value, microbatch) => {
		const probe = this.#first.get(name);
		if (probe === undefined) return;
		const { vocabularyShard, parallel, config } = this.run.language!;
		const { topology, microbatches, microBatchSize } = this.plan;
		const { batch, seq } = this.stepOne;
		const lane = topology.language.coordinates(this.run.rank).dp;
		const sample = (lane * microbatches + microbatch) * microBatchSize;
		const index = probe + Math.floor(sample / batch);
		const first = (sample % batch) * seq;
		// Ranks hold a run of the tokens each: between layers those of tp and cp, of logits those of cp.
		if (!isLogits(name)) {
			this.#probes.add(index, value.toFloat32(), (first + parallel.tokens.rank * value.rows) * value.width);
			return;
		}
		const { start, live } = vocabularyShard;
		const values = value.toFloat32();
		for (let row = 0; row < value.rows; row++) {
			const own = values.subarray(row * value.width, row * value.width + live);
			this.#probes.add(index, own, (first + parallel.cp.rank * value.rows + row) * config.vocabularySize + start);
		}
	};

	/** Compares the norm of every parameter's gradient, when they are final. */
	readonly gradients = (): void => {
		const { state } = this.run;
		for (const replica of state.replicas) replica.gatherGradients();
		const expected = Object.entries(this.stepOne.gradNorm);
		const norms = new Float64Array(expected.length);
		using whole = gatherTensors(
			"the gradients",
			gradientsOf(this.run),
			state.world,
			state.scalars.device,
			this.run.counts,
		);
		if (whole !== null) {
			using mapped = new MappedStore(whole, planTensors(whole, this.stepOne.names, "foreign"));
			expected.forEach(([name], at) => {
				const values = readTensor(mapped, name) as Float32Array;
				norms[at] = Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));
			});
		}
		reduceHost(state.world, state.scalars.device, norms);
		expected.forEach(([name, wanted], at) => {
			const actual = norms[at]!;
			const over = Math.abs(actual - wanted) - (this.stepOne.gradNormRounding ?? 0);
			const error = over <= 0 ? 0 : over / Math.max(Math.abs(wanted), 1e-12);
			const compared = { expected: wanted, actual, error, limit: parameterGradientLimit };
			this.#gradients.push({ name: `step 1 gradient of ${name}`, ...compared });
		});
	};

	/** Comparisons of the sums of all ranks; after step 1. */
	checks(): Check[] {
		const { world, scalars } = this.run.state;
		return [...this.#probes.checks(world, scalars.device), ...this.#gradients];
	}
}

/** Logits have a column for every word, all other values the model's width. */
function isLogits(name: string): boolean {
	return name.endsWith("logits");
}

/** Watches a step, counted from 0: `own`, and in step 1 the values that the reference recorded. */
export function watchedStep(stepOne: StepOne, plan: Plan, run: Run, step: number, own: StepWatch): StepWatch {
	const probes = step === 0 ? new LanguageProbes(stepOne, plan, run) : null;
	const forward: MicrobatchObserver = (...value) => {
		probes?.observe(...value);
		own.forward?.(...value);
	};
	return {
		...((probes || own.forward) && { forward }),
		gradients: () => {
			probes?.gradients();
			own.gradients?.();
		},
		checks: (result) => [...(probes?.checks() ?? []), ...own.checks(result)],
	};
}
