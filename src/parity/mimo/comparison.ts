/**
 * Comparison of any layout's run with a mimo-* folder: its names, the rule of weight decay, step 1 value by value, and
 * of every step the loss, norms and balancing losses. One process and many compare the same values.
 */
import { type NamedTensors, requireMatch, type TensorStore } from "../../checkpoint/index.ts";
import type { LogicalTensor } from "../../models/module-parameters.ts";
import { decayMultiplier } from "../../optim/adamw.ts";
import { exchangeTexts } from "../../parallel/index.ts";
import type { StepObserver, StepResult } from "../../train/step.ts";
import { bandLimit } from "../bands.ts";
import type { Precision } from "../bf16.ts";
import { type Check, type ParityReport, relative } from "../comparison.ts";
import { reduceHost } from "../reduce-host.ts";
import { requireKeys } from "../required-keys.ts";
import { compareSteps, gatherOver } from "../resolve-ties.ts";
import type { Trained } from "../snapshot.ts";
import { participants } from "../verify/plan.ts";
import type { MimoBatches } from "./batches.ts";
import type { MimoGolden, MimoGoldenConfig } from "./golden.ts";
import { samplesWithImages } from "./layout-check.ts";
import { MimoProbes, type RankView } from "./probes.ts";

export const parameterGradientLimit = 2e-5;

export interface MimoReference {
	readonly folder: string;
	readonly config: MimoGoldenConfig;
	readonly golden: MimoGolden;
	readonly batches: MimoBatches;
}

/** A training on one rank that can be compared. */
export interface ComparedRank extends RankView {
	/** Rank of this process in the run. */
	readonly rank: number;
	readonly state: Trained;
	/** This rank's part of the tensors. */
	readonly modules: NamedTensors;
	/** Whether this rank's part of a tensor is the one that counts: of equal copies only one does. */
	readonly counts: (tensor: LogicalTensor) => boolean;
	/** Trains step `step`, from 0, on the reference's samples. */
	train(step: number, observer: StepObserver): StepResult;
}

/** Every rank of the run calls this together; the report is complete on ranks of the language model. */
export function compareMimoRun(
	run: ComparedRank,
	reference: MimoReference,
	options: {
		readonly precision: Precision;
		readonly steps: number;
		readonly weights: TensorStore;
		readonly onStep?: (step: number, of: number) => void;
	},
): ParityReport {
	const { folder, config, golden, batches } = reference;
	const names = namesOf(run);
	requireNoOthers(options.weights, [...names.trained, ...names.others]);
	requireKeys(`${folder}/golden.json: grad_norm`, golden.step1_probe.grad_norm, names.trained);
	requireDecayNames(reference, names.trained);
	const decay = decayChecks(run, config);
	const train = (step: number): Check[] => {
		options.onStep?.(step + 1, options.steps);
		const probes = step === 0 ? new MimoProbes(config, golden, batches, run) : null;
		const gradients: Check[] = [];
		const observer = probes && {
			forward: probes.observe,
			gradients: () => gradients.push(...gradientChecks(run, golden)),
		};
		const result = run.train(step, observer ?? {});
		return [
			...(probes ? [...probes.checks(), ...gradients, ...decay] : []),
			...(run.language ? stepChecks(step, result, run, reference) : []),
		];
	};
	return compareSteps(run.rank, gatherOver(run.world, run.device), {
		folder,
		steps: options.steps,
		precision: options.precision,
		state: run.state,
		routers: run.language?.model.routers ?? new Map(),
		step: train,
	});
}

/** Names of the parameters that train, in the modules' order, and of all other tensors, on all ranks. */
function namesOf({ world, modules }: ComparedRank): { readonly trained: string[]; readonly others: string[] } {
	const own: [name: string, trained: boolean][] = [];
	for (const { name, value, gradient } of modules.logicalTensors()) {
		own.push([name, gradient !== null]);
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	const all = exchangeTexts(world, JSON.stringify(own)).flatMap((text) => JSON.parse(text) as typeof own);
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
function decayChecks({ world, state }: ComparedRank, { optimizer }: MimoGoldenConfig): Check[] {
	const excluded = new Set(optimizer.no_weight_decay);
	const own = state.replicas
		.flatMap(({ parameters }) => parameters.buffers.filter(({ frozen }) => !frozen))
		.flatMap(({ entries }) => entries.map(({ name, decays }) => [name, decayMultiplier(decays)] as const));
	const all = exchangeTexts(world, JSON.stringify(own)).flatMap((text) => JSON.parse(text) as typeof own);
	return [...new Map(all)].map(([name, actual]) => {
		// Experts are one stacked parameter here and separate ones in the reference: expert 0 stands for all.
		const expected = excluded.has(name) || excluded.has(`${name}0`) ? 0 : 1;
		return { name: `weight decay of ${name}`, expected, actual, error: Math.abs(actual - expected), limit: 0 };
	});
}

/** Norms of whole parameters' gradients: every rank adds the squares of the elements that it counts. */
function gradientChecks(run: ComparedRank, { step1_probe: { grad_norm: expected } }: MimoGolden): Check[] {
	// With ZeRO-1 a rank's gradients are final in its own slices only.
	for (const replica of run.state.replicas) replica.gatherGradients();
	const names = Object.keys(expected);
	const index = new Map(names.map((name, at) => [name, at]));
	const squares = new Float64Array(names.length);
	for (const tensor of run.modules.logicalTensors()) {
		const { name, value, gradient } = tensor;
		if (gradient && run.counts(tensor)) {
			squares[index.get(name)!]! += gradient.toFloat32().reduce((sum, x) => sum + x * x, 0);
		}
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	reduceHost(run.world, run.device, squares);
	return names.map((name, at) => {
		const [wanted, actual] = [expected[name]!, Math.sqrt(squares[at]!)];
		const error = relative(actual, wanted);
		return { name: `step 1 gradient of ${name}`, expected: wanted, actual, error, limit: parameterGradientLimit };
	});
}

/** Of a rank with routers. */
function stepChecks(step: number, result: StepResult, run: ComparedRank, { config, golden }: MimoReference): Check[] {
	const expected = golden.steps[step]!;
	const check = (what: string, actual: number, wanted: number, limit: number): Check => ({
		name: `step ${step + 1} ${what}`,
		expected: wanted,
		actual,
		error: relative(actual, wanted),
		limit,
	});
	const balanced = (value: number | undefined, wanted: number, what: string) =>
		check(
			what,
			value ?? Number.NaN,
			wanted,
			bandLimit("seq_load_balancing_loss", expected.seq_load_balancing_loss_band ?? 0),
		);
	const { seq_load_balancing_loss: balancing, seq_load_balancing_loss_layers: byLayer = {} } = expected;
	return [
		check("loss tokens", result.tokens, expected.loss_tokens, 0),
		check("participants", result.participation?.participants ?? Number.NaN, participantsHere(step, run, config), 0),
		check("loss", result.loss, expected.loss, bandLimit("loss", expected.loss_band)),
		check("gradient norm", result.gradientNorm, expected.grad_norm, bandLimit("grad_norm", expected.grad_norm_band)),
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
