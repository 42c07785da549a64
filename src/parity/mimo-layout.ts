/**
 * A mimo-* reference folder on any layout: encoder and language model on their own grids of processes, meeting at the
 * bridge. Weights are whole and batches explicit, so every layout must give the reference's losses, norms and gradients.
 */
import { join } from "node:path";
import { openWeights } from "../checkpoint/conversion/weights.ts";
import { firstCopyCounts } from "../checkpoint/gathered-store.ts";
import { loadModel } from "../checkpoint/model-store.ts";
import { openSafetensors } from "../checkpoint/safetensors.ts";
import type { ImageSet } from "../data/images.ts";
import type { Microbatch } from "../data/microbatch.ts";
import type { NamedTopology } from "../parallel/layout.ts";
import type { World } from "../parallel/world.ts";
import { Tensor } from "../tensor/tensor.ts";
import { type EncoderSide, type LanguageSide, mimoSide } from "../train/mimo-run.ts";
import { participationFactor } from "../train/participation.ts";
import { trainStep } from "../train/step.ts";
import type { Precision } from "./bf16.ts";
import { type Check, type ParityReport, relative } from "./comparison.ts";
import { compareStep, decayRule, microbatchesOf, parameterGradientLimit } from "./mimo.ts";
import { MimoBatches } from "./mimo-batches.ts";
import { type MimoGolden, type MimoGoldenConfig, readMimoGolden } from "./mimo-golden.ts";
import { checkParticipation, planOfGolden } from "./mimo-layout-check.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./mimo-model.ts";
import { compareSteps, gatherOver } from "./resolve-ties.ts";
import { encoderMicrobatches, languageMicrobatches, type Plan } from "./verify/plan.ts";

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
		adam: {
			beta1: config.optimizer.betas[0],
			beta2: config.optimizer.betas[1],
			epsilon: config.optimizer.eps,
			weightDecayMultiplier: decayRule(config),
		},
		clipGrad: config.optimizer.clip_grad,
		seed: 1,
		distributedOptimizer: options.distributedOptimizer ?? false,
	});
	{
		using weights =
			options.weights === undefined ? openSafetensors(join(path, "model.safetensors")) : openWeights(options.weights);
		loadModel(side, weights, true);
		side.state.optimizer.refreshMasters();
	}
	const steps = Math.min(options.steps ?? golden.steps.length, golden.steps.length);
	const train = (step: number): Check[] => {
		const checks: Check[] = [];
		const result = runStep(side, plan, config, batches, step, () => {
			// With ZeRO-1 a rank's gradients are final in its own slices only: the global norm covers those.
			if (step === 0 && !options.distributedOptimizer) compareGradientNorms(side, golden, checks);
		});
		// Encoder ranks have no routers, hence no balancing loss.
		if (side.module === "language") compareStep(step, result, golden, checks);
		world.progress(step + 1);
		return checks;
	};
	const report = compareSteps(world.rank, gatherOver(side.world, world.device, world.rank, topology.worldSize), {
		folder: path,
		steps,
		precision,
		state: side.state,
		routers: side.module === "language" ? side.model.routers : new Map(),
		step: train,
	});
	for (const one of side.owned) one[Symbol.dispose]();
	return report;
}

function runStep(
	side: EncoderSide | LanguageSide,
	plan: Plan,
	config: MimoGoldenConfig,
	batches: MimoBatches,
	step: number,
	gradients: () => void,
) {
	const common = { iteration: step, learningRate: config.optimizer.lr, weightDecay: config.optimizer.weight_decay };
	const samples = microbatchesOf(batches, config, step);
	if (side.module === "language") {
		const microbatches = languageMicrobatches(plan, samples, side.lane);
		return trainStep<Microbatch>(side.state, { ...common, microbatches }, { gradients });
	}
	const microbatches = encoderMicrobatches(plan, samples, side.lane);
	const { lanes: encoderLanes } = plan.topology.encoder!;
	const corrected = config.encoder_grad_participation === "corrected" && {
		encoderCorrection: {
			replica: side.state.replicas[0]!,
			factor: () => participationFactor(batches.participants(step), encoderLanes),
		},
	};
	return trainStep<ImageSet>({ ...side.state, ...corrected }, { ...common, microbatches }, { gradients });
}

/** Norms of whole parameters' gradients: every rank adds the squares of what it alone counts. */
function compareGradientNorms(side: EncoderSide | LanguageSide, golden: MimoGolden, checks: Check[]): void {
	const expected = Object.entries(golden.step1_probe.grad_norm);
	const index = new Map(expected.map(([name], at) => [name, at]));
	const squares = new Float64Array(expected.length);
	const { replicas, model } = side.groups;
	const counts = firstCopyCounts({ ...replicas, tensor: model.tp });
	for (const tensor of side.logicalTensors()) {
		const { name, value, gradient } = tensor;
		const at = index.get(name);
		if (counts(tensor) && gradient && at !== undefined) {
			squares[at]! += gradient.toFloat32().reduce((sum, x) => sum + x * x, 0);
		}
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	using sums = Tensor.from(side.state.scalars.device, squares);
	side.world.allReduce(sums).wait();
	sums.device.copyToHost(squares, sums);
	for (const [at, [name, wanted]] of expected.entries()) {
		const actual = Math.sqrt(squares[at]!);
		const error = relative(actual, wanted);
		checks.push({ name: `step 1 gradient of ${name}`, expected: wanted, actual, error, limit: parameterGradientLimit });
	}
}
