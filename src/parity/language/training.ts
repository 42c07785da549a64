/**
 * Trains a language model as a reference of any kind did and compares: step 1 value by value, then the values that the kind of
 * reference records of every step.
 */
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { segmentsOf } from "../../models/language/pipeline-segments.ts";
import type { AdamWOptions } from "../../optim/adamw.ts";
import type { NamedTopology, World } from "../../parallel/index.ts";
import { assemble, type Run } from "../../train/assemble.ts";
import type { LossMean } from "../../train/loss-weights.ts";
import type { RunSpecification } from "../../train/run-specification.ts";
import { type StepObserver, type StepResult, trainStep } from "../../train/step.ts";
import type { Precision } from "../bf16.ts";
import { type Check, type ParityReport, relative } from "../comparison.ts";
import { evenSegments } from "../layout-cuts.ts";
import { compareSteps, gatherOver } from "../resolve-ties.ts";
import { dealtTo, type Plan } from "../verify/plan.ts";
import { LanguageProbes, type StepOne } from "./probes.ts";

/** A reference and how it is compared. */
export interface LanguageReference {
	readonly folder: string;
	readonly language: HybridConfig;
	readonly elastic?: RunSpecification["elastic"];
	/** Default: tokens. */
	readonly lossMean?: LossMean;
	/** As golden.json has it. */
	readonly optimizer: {
		readonly lr: number;
		readonly betas: readonly [number, number];
		readonly eps: number;
		readonly weight_decay: number;
		readonly clip_grad: number;
	};
	/** Factors of the parameters' weight decay; default: those of `mimo train`. */
	readonly decay?: Pick<AdamWOptions, "weightDecayMultiplier">;
	readonly precision: Precision;
	/** Segments that every pipeline stage has; default one. */
	readonly segmentsPerStage?: number;
	readonly plan: Plan;
	readonly stepOne: StepOne;
	/** Samples of every step. */
	readonly batches: readonly (readonly ImageTextMicrobatch[])[];
	/** Puts the reference's weights into a run; `partial`: this process has a part of it. */
	readonly load: (run: Run, partial: boolean) => void;
	/** Comparisons before the first step. */
	readonly before?: (run: Run) => Check[];
	/** Looks at a step, counted from 0, on this rank's microbatches. */
	readonly watch: (run: Run, step: number, microbatches: readonly ImageTextMicrobatch[]) => StepWatch;
	readonly onStep?: ((step: number, of: number) => void) | undefined;
}

export interface StepWatch extends Pick<StepObserver, "forward" | "gradients"> {
	/** After the step, on every rank together. */
	readonly checks: (result: StepResult) => Check[];
}

/** A value of a step, counted from 0, with a limit of its relative difference. */
export type CheckOfStep = (name: string, expected: number, actual: number, limit: number) => Check;
export function checksOfStep(step: number): CheckOfStep {
	return (name, expected, actual, limit) => {
		return { name: `step ${step + 1} ${name}`, expected, actual, error: relative(actual, expected), limit };
	};
}

/** Every rank of the world calls this together, and all get the report. */
export async function compareLanguageTraining(
	world: World,
	layout: NamedTopology,
	reference: LanguageReference,
): Promise<ParityReport> {
	const { folder, language, elastic = null, optimizer, precision, plan, batches } = reference;
	const segments = layout.topology.language.shape.pipeline * (reference.segmentsPerStage ?? 1);
	const specification: RunSpecification = {
		...{ encoders: [], clipGrad: optimizer.clip_grad, seed: 1 },
		language,
		elastic,
		lossMean: reference.lossMean ?? "tokens",
		segments: segmentsOf(evenSegments(language.pattern.length, segments)),
		frozenLanguage: false,
		adam: {
			beta1: optimizer.betas[0],
			beta2: optimizer.betas[1],
			epsilon: optimizer.eps,
			...reference.decay,
		},
	};
	using run = await assemble(specification, layout.topology, world);
	const { state } = run;
	reference.load(run, world.size > 1);
	state.optimizer.refreshMasters();
	const before = reference.before?.(run) ?? [];
	const steps = batches.length;
	const step = (index: number): Check[] => {
		reference.onStep?.(index + 1, steps);
		const microbatches = dealtTo(world.rank, plan, batches[index]!);
		const probes = index === 0 ? new LanguageProbes(reference.stepOne, plan, run) : null;
		const watch = reference.watch(run, index, microbatches);
		const input = { microbatches, iteration: index, learningRate: optimizer.lr, weightDecay: optimizer.weight_decay };
		const result = trainStep(state, input, {
			...((probes || watch.forward) && {
				forward: (...value) => {
					probes?.observe(...value);
					watch.forward?.(...value);
				},
			}),
			gradients: () => {
				probes?.gradients();
				watch.gradients?.();
			},
		});
		world.progress(index + 1);
		return [...(index === 0 ? before : []), ...(probes?.checks() ?? []), ...watch.checks(result)];
	};
	const compared = { folder, steps, precision, state, routers: run.language!.routers, step };
	return compareSteps(world.rank, gatherOver(state.world, world.device), compared);
}
