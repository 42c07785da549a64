/** What a layer-* or hybrid-* folder recorded inside step 1, wherever its parts lie: layers, logits, gradient norms. */
import { gatherTensors } from "../checkpoint/gathered-store.ts";
import type { Correspondence } from "../checkpoint/mapping.ts";
import { MappedStore, planTensors } from "../checkpoint/mapping.ts";
import { gradientsOf } from "../checkpoint/model-store.ts";
import { readTensor } from "../checkpoint/store.ts";
import type { Run } from "../train/assemble.ts";
import type { MicrobatchObserver } from "../train/rank-passes.ts";
import { type Check, relative } from "./comparison.ts";
import type { LanguageGolden } from "./language-golden.ts";
import { ProbeSums } from "./probe-sums.ts";
import { reduceHost } from "./reduce-host.ts";
import type { Plan } from "./verify/plan.ts";

const parameterGradientLimit = 2e-5;

/** Every rank of the run makes one for step 1, observes with it, and calls `checks` together with all others. */
export class LanguageProbes {
	readonly #probes: ProbeSums;
	readonly #gradients: Check[] = [];

	constructor(
		readonly golden: LanguageGolden,
		readonly names: Correspondence,
		readonly plan: Plan,
		readonly run: Run,
	) {
		const { layers, logits } = golden.step1_probe;
		const { config } = run.language!;
		const tokens = golden.batch * golden.seq;
		this.#probes = new ProbeSums([
			...layers.map((probe, layer) => ({
				name: `step 1 layer ${layer}`,
				elements: tokens * config.hiddenSize,
				...probe,
			})),
			{ name: "step 1 logits", elements: tokens * config.vocabularySize, ...logits },
		]);
	}

	/** Adds this rank's part of a value of step 1. */
	readonly observe: MicrobatchObserver = (name, value, microbatch) => {
		const { vocabularyShard, parallel, config } = this.run.language!;
		const { topology, microbatches, microBatchSize } = this.plan;
		const lane = topology.language.coordinates(this.run.rank).dp;
		const first = (lane * microbatches + microbatch) * microBatchSize * this.golden.seq;
		const layer = /^layer\.(\d+)$/.exec(name)?.[1];
		// Tensor-parallel ranks hold a run of the tokens each.
		if (layer !== undefined) {
			const begin = (first + parallel.tp.rank * value.rows) * value.width;
			this.#probes.add(Number(layer), value.toFloat32(), begin);
		}
		if (name !== "logits") return;
		const { start, live } = vocabularyShard;
		const values = value.toFloat32();
		for (let row = 0; row < value.rows; row++) {
			const own = values.subarray(row * value.width, row * value.width + live);
			this.#probes.add(this.golden.step1_probe.layers.length, own, (first + row) * config.vocabularySize + start);
		}
	};

	/** Compares the norm of every parameter's gradient, when they are final. */
	readonly gradients = (): void => {
		const { state } = this.run;
		for (const replica of state.replicas) replica.gatherGradients();
		const expected = Object.entries(this.golden.step1_probe.grad_norm);
		const norms = new Float64Array(expected.length);
		using whole = gatherTensors("the gradients", gradientsOf(this.run), state.world, this.run.counts);
		if (whole !== null) {
			using mapped = new MappedStore(whole, planTensors(whole, this.names, "foreign"));
			expected.forEach(([name], at) => {
				const values = readTensor(mapped, name) as Float32Array;
				norms[at] = Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));
			});
		}
		reduceHost(state.world, state.scalars.device, norms);
		expected.forEach(([name, wanted], at) => {
			const actual = norms[at]!;
			const error = relative(actual, wanted);
			const compared = { expected: wanted, actual, error, limit: parameterGradientLimit };
			this.#gradients.push({ name: `step 1 gradient of ${name}`, ...compared });
		});
	};

	/** After step 1: what the sums of all ranks say. */
	checks(): Check[] {
		const { world, scalars } = this.run.state;
		return [...this.#probes.checks(world, scalars.device), ...this.#gradients];
	}
}
