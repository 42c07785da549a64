/**
 * Comparison of any layout's run with a mimo-* folder: its names, the rule of weight decay, step 1 value by value, and
 * of every step the loss, norms and balancing losses. One process and many compare the same values.
 */
import { requireMatch, type TensorStore } from "../../checkpoint/index.ts";
import { decayMultiplier } from "../../optim/optimizer.ts";
import { exchangeTexts, type Topology } from "../../parallel/index.ts";
import type { Run } from "../../train/assemble.ts";
import type { StepResult } from "../../train/step-state.ts";
import { bandLimit, type Check, relative } from "../comparison.ts";
import { requireKeys } from "../golden-fields.ts";
import { reduceHost } from "../probe-sums.ts";
import { checksOfStep, type StepWatch } from "../reference.ts";
import { type Plan, participants } from "../verify/samples.ts";
import type { MimoBatches } from "./batches.ts";
import type { MimoGolden, MimoGoldenConfig } from "./golden.ts";
import { samplesWithImages } from "./golden-checks.ts";
import { MimoProbes, type RankView } from "./probes.ts";

export const parameterGradientLimit = 2e-5;

export interface MimoReference {
	readonly folder: string;
	readonly config: MimoGoldenConfig;
	readonly golden: MimoGolden;
	readonly batches: MimoBatches;
}

/** A training on one rank. */
interface ComparedRank extends RankView {
	readonly run: Run;
}

/** Every rank of the run makes one before step 1, and its checks are complete on ranks of the language model. */
export class MimoComparison {
	readonly #rank: ComparedRank;
	readonly #decay: readonly Check[];

	/** Throws a UserError for names in the folder or among its weights that are not the model's. */
	constructor(
		private readonly reference: MimoReference,
		{ run, plan, topology, rank }: { run: Run; plan: Plan; topology: Topology; rank: number },
		weights: TensorStore,
	) {
		const { state, encoder, language } = run;
		const laneIn = (grid: typeof topology.language) => grid.coordinates(rank).dp;
		this.#rank = {
			...{ run, plan, world: state.world, device: state.scalars.device },
			language: language && { model: language, lane: laneIn(topology.language) },
			encoder: encoder && { tp: encoder.parallel.tp, lane: laneIn(topology.encoders[0]!) },
		};
		const names = namesOf(run);
		requireNoOthers(weights, [...names.trained, ...names.others]);
		const { folder, config, golden } = reference;
		requireKeys(`${folder}/golden.json: grad_norm`, golden.step1_probe.grad_norm, names.trained);
		requireDecayNames(reference, names.trained);
		this.#decay = decayChecks(run, config);
	}

	/** Looks at a step, counted from 0. */
	watch(step: number): StepWatch {
		const { config, golden, batches } = this.reference;
		const stepOf = (result: StepResult) =>
			this.#rank.language ? stepChecks(step, result, this.#rank, this.reference) : [];
		if (step > 0) return { checks: stepOf };
		const probes = new MimoProbes(config, golden, batches, this.#rank);
		const gradients: Check[] = [];
		return {
			forward: probes.observe,
			gradients: () => gradients.push(...gradientChecks(this.#rank.run, golden)),
			checks: (result) => [...probes.checks(), ...gradients, ...this.#decay, ...stepOf(result)],
		};
	}
}

/** Names of the parameters that train, in the modules' order, and of all other tensors, on all ranks. */
function namesOf(run: Run): { readonly trained: string[]; readonly others: string[] } {
	const own: [name: string, trained: boolean][] = [];
	for (const { name, value, gradient } of run.logicalTensors()) {
		own.push([name, gradient !== null]);
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	const all = exchangeTexts(run.state.world, JSON.stringify(own)).flatMap((text) => JSON.parse(text) as typeof own);
	const names = (wanted: boolean) => [
		...new Set(all.filter(([, trained]) => trained === wanted).map(([name]) => name)),
	];
	return { trained: names(true), others: names(false) };
}

/** Throws for tensors that no rank loads: they belong to another model. */
function requireNoOthers({ path, tensors }: TensorStore, names: readonly string[]): void {
	const known = new Set(names);
	const unexpected = [...tensors.keys()].filter((name) => !known.has(name));
	requireMatch(path, { missing: [], unexpected, misshaped: [] });
}

function requireDecayNames({ folder, config }: MimoReference, trained: readonly string[]): void {
	const known = new Set(trained);
	const listed = config.optimizer.no_weight_decay.filter((name) => !known.has(name));
	requireKeys(`${folder}/config.json: no_weight_decay`, Object.fromEntries(listed.map((name) => [name, 0])), []);
}

/** The rule that the optimizer here follows, parameter by parameter, against the reference's list. */
function decayChecks({ state }: Run, { optimizer }: MimoGoldenConfig): Check[] {
	const excluded = new Set(optimizer.no_weight_decay);
	const own = state.replicas
		.flatMap(({ parameters }) => parameters.buffers.filter(({ frozen }) => !frozen))
		.flatMap(({ entries }) => entries.map(({ name, decays }) => [name, decayMultiplier(decays)] as const));
	const all = exchangeTexts(state.world, JSON.stringify(own)).flatMap((text) => JSON.parse(text) as typeof own);
	return [...new Map(all)].map(([name, actual]) => {
		// Experts are one stacked parameter here and separate ones in the reference: expert 0 stands for all.
		const expected = excluded.has(name) || excluded.has(`${name}0`) ? 0 : 1;
		return { name: `weight decay of ${name}`, expected, actual, error: Math.abs(actual - expected), limit: 0 };
	});
}

/** Norms of whole parameters' gradients: every rank adds the squares of the elements that it counts. */
function gradientChecks(run: Run, { step1_probe: { grad_norm: expected } }: MimoGolden): Check[] {
	// With ZeRO-1 a rank's gradients are final in its own slices only.
	for (const replica of run.state.replicas) replica.gatherGradients();
	const names = Object.keys(expected);
	const index = new Map(names.map((name, at) => [name, at]));
	const squares = new Float64Array(names.length);
	for (const tensor of run.logicalTensors()) {
		const { name, value, gradient } = tensor;
		if (gradient && run.counts(tensor)) {
			squares[index.get(name)!]! += gradient.toFloat32().reduce((sum, x) => sum + x * x, 0);
		}
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	reduceHost(run.state.world, run.state.scalars.device, squares);
	return names.map((name, at) => {
		const [wanted, actual] = [expected[name]!, Math.sqrt(squares[at]!)];
		const error = relative(actual, wanted);
		return { name: `step 1 gradient of ${name}`, expected: wanted, actual, error, limit: parameterGradientLimit };
	});
}

/** Of a rank with routers. */
function stepChecks(step: number, result: StepResult, run: ComparedRank, { config, golden }: MimoReference): Check[] {
	const expected = golden.steps[step]!;
	const check = checksOfStep(step);
	const balanced = (value: number | undefined, wanted: number, what: string) =>
		check(
			what,
			wanted,
			value ?? Number.NaN,
			bandLimit("seq_load_balancing_loss", expected.seq_load_balancing_loss_band ?? 0),
		);
	const { seq_load_balancing_loss: balancing, seq_load_balancing_loss_layers: byLayer = {} } = expected;
	return [
		check("loss tokens", expected.loss_tokens, result.tokens, 0),
		check("participants", participantsHere(step, run, config), result.participation?.participants ?? Number.NaN, 0),
		check("loss", expected.loss, result.loss, bandLimit("loss", expected.loss_band)),
		check("gradient norm", expected.grad_norm, result.gradientNorm, bandLimit("grad_norm", expected.grad_norm_band)),
		...(balancing === undefined
			? []
			: [balanced(result.balancing.seq_load_balancing_loss, balancing, "balancing loss")]),
		...Object.entries(byLayer).map(([layer, wanted]) => {
			const own = result.balancingByLayer.get(Number(layer))?.seq_load_balancing_loss;
			return balanced(own, wanted, `balancing loss of layer ${layer}`);
		}),
	];
}

/** Encoder ranks of this layout whose samples have images; on the reference's own layout the reference's number. */
function participantsHere(step: number, { plan }: ComparedRank, config: MimoGoldenConfig): number {
	return participants(plan, samplesWithImages(config, step));
}
