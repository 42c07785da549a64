/**
 * Trains as a reference folder of any format did and compares: a format reads the folder and says what is compared of a step, and
 * the rest is the same for all. Weights are whole and batches explicit, so every layout must give the reference's values.
 */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { HybridConfig } from "../models/language/config.ts";
import { segmentsOf } from "../models/language/pipeline-segments.ts";
import type { NamedTopology, World } from "../parallel/index.ts";
import { assemble, type Run } from "../train/assemble.ts";
import type { RunSpecification } from "../train/run-specification.ts";
import { trainStep } from "../train/step.ts";
import type { StepObserver, StepResult } from "../train/step-state.ts";
import { type Check, type ParityReport, type Precision, relative } from "./comparison.ts";
import { evenSegments } from "./layout-cuts.ts";
import { compareSteps, gatherOver } from "./resolve-ties.ts";
import { dealtTo, type Plan } from "./verify/samples.ts";

/** A format of reference folders. */
export interface ReferenceFormat {
	/** Whether a folder is in this format. */
	readonly holds: (folder: string) => boolean;
	readonly hasEncoder: boolean;
	/** The layout that a folder is compared on if no other is asked for, as `--layout` writes it; null: this process alone, without ranks. */
	readonly layout: (folder: string) => string | null;
	/** A noun phrase for a folder that cannot take other weights than its own; null: it can. */
	readonly ownWeights: string | null;
	/** A noun phrase for a folder that is compared in fp32 alone; null: in bf16 too. */
	readonly fp32Alone: string | null;
	/** How a folder's samples are dealt out on a layout. Throws a UserError that says why the folder cannot run on it. */
	readonly plan: (layout: NamedTopology, folder: string) => Plan;
	/** Reads a folder, for every rank of a run. */
	readonly open: (folder: string, options: OpenOptions) => Reference;
}

export interface OpenOptions {
	readonly layout: NamedTopology;
	readonly rank: number;
	readonly plan: Plan;
	readonly precision: Precision;
	/** Checkpoint of any format to take the weights from; null: the folder's own. */
	readonly weights: string | null;
}

/** A folder, and how it is compared. */
export interface Reference extends Disposable {
	/** Without `segments`. */
	readonly specification: RunSpecification;
	readonly optimizer: { readonly lr: number; readonly weight_decay: number };
	readonly steps: number;
	/** Samples of a step, counted from 0. */
	readonly batch: (step: number) => readonly ImageTextMicrobatch[];
	/** Puts the reference's weights into a run; `partial`: this process has a part of it. */
	readonly load: (run: Run, partial: boolean) => void;
	/** Comparisons before the first step. */
	readonly before: ((run: Run) => Check[]) | null;
	/** Looks at a step, counted from 0, on this rank's microbatches. */
	readonly watch: (run: Run, step: number, microbatches: readonly ImageTextMicrobatch[]) => StepWatch;
}

export interface StepWatch extends Pick<StepObserver, "forward" | "gradients"> {
	/** After the step, on every rank together. */
	readonly checks: (result: StepResult) => Check[];
}

export interface CompareOptions {
	readonly onStep?: (step: number, of: number) => void;
	/** Default fp32, compared value by value; bf16 only by its losses. */
	readonly precision?: Precision;
	/** Segments that every pipeline stage has; default one. */
	readonly segmentsPerStage?: number;
	/** Stop after this many steps; default all. */
	readonly steps?: number;
	/** Checkpoint of any format to take the weights from; default: the folder's own. */
	readonly weights?: string | null;
	/** May change the run that the folder describes: to see whether the comparison notices. */
	readonly configure?: (specification: RunSpecification) => RunSpecification;
}

/** A value of a step, counted from 0, with a limit of its relative difference. */
export type CheckOfStep = (name: string, expected: number, actual: number, limit: number) => Check;
export function checksOfStep(step: number): CheckOfStep {
	return (name, expected, actual, limit) => {
		return { name: `step ${step + 1} ${name}`, expected, actual, error: relative(actual, expected), limit };
	};
}

/** An optimizer, as golden.json has it. */
export interface ReferenceOptimizer {
	readonly lr: number;
	readonly betas: readonly [number, number];
	readonly eps: number;
	readonly weight_decay: number;
	readonly clip_grad: number;
}

/** The run of a reference without an encoder. */
export function languageRun(language: HybridConfig, optimizer: ReferenceOptimizer): RunSpecification {
	return { ...trainedBy(optimizer), encoders: [], language };
}

/** The optimizer's part of a reference's run. */
export function trainedBy({ betas, eps, clip_grad }: ReferenceOptimizer) {
	return {
		adam: { beta1: betas[0], beta2: betas[1], epsilon: eps },
		clipGrad: clip_grad,
		seed: 1,
		frozenLanguage: false,
	};
}

/** Every rank of the world calls this together; the report is complete on ranks of the language model. */
export async function compareTraining(
	world: World,
	layout: NamedTopology,
	format: ReferenceFormat,
	folder: string,
	options: CompareOptions = {},
): Promise<ParityReport> {
	const { precision = "f32", weights = null, segmentsPerStage = 1, onStep } = options;
	const plan = format.plan(layout, folder);
	using reference = format.open(folder, { layout, rank: world.rank, plan, precision, weights });
	const { specification, optimizer } = reference;
	const described = {
		...specification,
		segments: segmentsOf(
			evenSegments(specification.language.pattern.length, layout.topology.language.shape.pipeline * segmentsPerStage),
		),
	};
	using run = await assemble(options.configure?.(described) ?? described, layout.topology, world);
	const { state } = run;
	reference.load(run, world.size > 1);
	state.optimizer.refreshMasters();
	const before = reference.before?.(run) ?? [];
	const steps = Math.min(options.steps ?? reference.steps, reference.steps);
	const step = (index: number): Check[] => {
		onStep?.(index + 1, steps);
		const microbatches = dealtTo(world.rank, plan, reference.batch(index));
		const { forward, gradients, checks } = reference.watch(run, index, microbatches);
		const input = { microbatches, iteration: index, learningRate: optimizer.lr, weightDecay: optimizer.weight_decay };
		const result = trainStep(state, input, { ...(forward && { forward }), ...(gradients && { gradients }) });
		world.progress(index + 1);
		return [...(index === 0 ? before : []), ...checks(result)];
	};
	const routers = run.language?.routers ?? new Map();
	return compareSteps(world.rank, gatherOver(state.world, world.device), {
		folder,
		steps,
		precision,
		state,
		routers,
		step,
	});
}
