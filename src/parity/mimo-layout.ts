/**
 * A mimo-* reference folder on any layout: encoder and language model on their own grids of processes, meeting at the
 * bridge. Weights are whole and batches explicit, so every layout must give the reference's losses, norms and gradients.
 */
import { firstCopyCounts } from "../checkpoint/gathered-store.ts";
import { loadModel } from "../checkpoint/model-store.ts";
import type { ImageSet } from "../data/images.ts";
import type { Microbatch } from "../data/microbatch.ts";
import type { NamedTopology } from "../parallel/layout.ts";
import type { World } from "../parallel/world.ts";
import { mimoSide } from "../train/mimo-run.ts";
import { type StepObserver, trainStep } from "../train/step.ts";
import type { Precision } from "./bf16.ts";
import type { ParityReport } from "./comparison.ts";
import { adamOf, openReferenceWeights, stepOf } from "./mimo.ts";
import { MimoBatches } from "./mimo-batches.ts";
import { compareMimoRun } from "./mimo-comparison.ts";
import { readMimoGolden } from "./mimo-golden.ts";
import { checkParticipation, planOfGolden } from "./mimo-layout-check.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./mimo-model.ts";
import { encoderMicrobatches, languageMicrobatches } from "./verify/plan.ts";

export interface MimoLayoutOptions {
	/** Default fp32, compared value by value; bf16 only by its losses. */
	readonly precision?: Precision;
	/** Stop after this many steps; default all. */
	readonly steps?: number;
	readonly distributedOptimizer?: boolean;
	/** Checkpoint of any format to take the weights from; default: the folder's own. */
	readonly weights?: string | undefined;
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
	const { precision = "f32" } = options;
	checkParticipation(path, config, topology.encoder!.lanes);
	const plan = planOfGolden(layout, config);
	const batches = new MimoBatches(path, config);
	const side = await mimoSide(world, topology, {
		encoder: goldenEncoderConfig(config, precision),
		language: goldenLanguageConfig(config, precision),
		imageTokenId: config.language_model.image_token_id,
		frozen: { tower: config.vision.frozen, projector: config.projector.frozen, language: false },
		adam: adamOf(config),
		clipGrad: config.optimizer.clip_grad,
		seed: 1,
		distributedOptimizer: options.distributedOptimizer ?? false,
		participation: config.encoder_grad_participation,
	});
	using weights = openReferenceWeights(path, options.weights);
	loadModel(side, weights, true);
	side.state.optimizer.refreshMasters();
	const { lane } = side;
	const { replicas, model } = side.groups;
	const train = (step: number, observer: StepObserver) => {
		const samples = batches.step(step);
		const common = stepOf(config, step);
		const result =
			side.module === "language"
				? trainStep<Microbatch>(
						side.state,
						{ ...common, microbatches: languageMicrobatches(plan, samples, lane) },
						observer,
					)
				: trainStep<ImageSet>(
						side.state,
						{ ...common, microbatches: encoderMicrobatches(plan, samples, lane) },
						observer,
					);
		world.progress(step + 1);
		return result;
	};
	const run = {
		rank: world.rank,
		plan,
		world: side.world,
		device: world.device,
		language: side.module === "language" ? { model: side.model, lane } : null,
		encoder: side.module === "encoder" ? { tp: model.tp, lane } : null,
		state: side.state,
		modules: side,
		counts: firstCopyCounts({ ...replicas, tensor: model.tp }),
		train,
	};
	const steps = Math.min(options.steps ?? golden.steps.length, golden.steps.length);
	const report = compareMimoRun(run, { folder: path, config, golden, batches }, { precision, steps, weights });
	for (const one of side.owned) one[Symbol.dispose]();
	return report;
}
