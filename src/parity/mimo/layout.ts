/**
 * A mimo-* reference folder on any layout. Weights are whole and batches explicit, so every layout must give the
 * reference's losses, norms and gradients.
 */
import { join } from "node:path";
import { loadModel, openSafetensors, openWeights } from "../../checkpoint/index.ts";
import { segmentsOf } from "../../models/language/pipeline-segments.ts";
import { type NamedTopology, visionModule, type World } from "../../parallel/index.ts";
import { assemble } from "../../train/assemble.ts";
import type { EncoderSpecification, RunSpecification } from "../../train/run-specification.ts";
import { type StepObserver, trainStep } from "../../train/step.ts";
import type { Precision } from "../bf16.ts";
import type { ParityReport } from "../comparison.ts";
import { evenSegments } from "../layout-cuts.ts";
import { dealtTo } from "../verify/plan.ts";
import { MimoBatches } from "./batches.ts";
import { compareMimoRun } from "./comparison.ts";
import { type MimoGoldenConfig, readMimoGolden } from "./golden.ts";
import { checkParticipation, planOfGolden } from "./layout-check.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./model.ts";
import type { MimoParityOptions } from "./one-process.ts";

export interface MimoLayoutOptions extends MimoParityOptions {
	readonly distributedOptimizer?: boolean;
}

/** Every rank of the world calls this; the report is complete on language ranks. */
export async function mimoLayoutParity(
	world: World,
	layout: NamedTopology,
	path: string,
	options: MimoLayoutOptions = {},
): Promise<ParityReport> {
	const { config, golden } = readMimoGolden(path);
	const { topology } = layout;
	const { precision = "f32", distributedOptimizer = false } = options;
	const plan = planOfGolden(layout, config);
	checkParticipation(path, config, plan);
	const batches = new MimoBatches(path, config);
	const described = goldenSpecification(config, precision);
	const [encoder] = described.encoders as [EncoderSpecification];
	const specification = {
		...described,
		encoders: [{ ...encoder, config: options.configure?.(encoder.config) ?? encoder.config }],
		segments: segmentsOf(evenSegments(config.language_model.pattern.length, topology.language.shape.pipeline)),
		distributedOptimizer,
	};
	using run = await assemble(specification, topology, world);
	const { state } = run;
	using weights =
		options.weights === undefined ? openSafetensors(join(path, "model.safetensors")) : openWeights(options.weights);
	loadModel(run, weights, world.size > 1);
	state.optimizer.refreshMasters();
	const laneIn = (grid: typeof topology.language) => grid.coordinates(world.rank).dp;
	const { optimizer } = config;
	const train = (step: number, observer: StepObserver) => {
		const microbatches = dealtTo(world.rank, plan, batches.step(step));
		const about = { iteration: step, learningRate: optimizer.lr, weightDecay: optimizer.weight_decay };
		const result = trainStep(state, { microbatches, ...about }, observer);
		world.progress(step + 1);
		return result;
	};
	const compared = {
		rank: world.rank,
		plan,
		world: state.world,
		device: world.device,
		language: run.language && { model: run.language, lane: laneIn(topology.language) },
		encoder: run.encoder && { tp: run.encoder.parallel.tp, lane: laneIn(topology.encoders[0]!) },
		state,
		modules: run,
		counts: run.counts,
		train,
	};
	const steps = Math.min(options.steps ?? golden.steps.length, golden.steps.length);
	const { onStep } = options;
	return compareMimoRun(
		compared,
		{ folder: path, config, golden, batches },
		{ precision, steps, weights, ...(onStep && { onStep }) },
	);
}

/** The run that a folder describes; which parameters decay is the rule of `mimo train`. */
export function goldenSpecification(config: MimoGoldenConfig, precision: Precision): RunSpecification {
	const { optimizer } = config;
	return {
		encoders: [
			{
				name: visionModule,
				config: goldenEncoderConfig(config, precision),
				placeholderId: config.language_model.image_token_id,
				frozen: { tower: config.vision.frozen, projector: config.projector.frozen },
				participation: { policy: config.encoder_grad_participation },
			},
		],
		language: goldenLanguageConfig(config, precision),
		frozenLanguage: false,
		adam: { beta1: optimizer.betas[0], beta2: optimizer.betas[1], epsilon: optimizer.eps },
		clipGrad: optimizer.clip_grad,
		seed: 1,
	};
}
