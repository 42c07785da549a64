/** A mimo-* reference folder on layout `1`: one process holds both modules and accumulates the microbatches of all lanes. */
import { join } from "node:path";
import { openWeights } from "../checkpoint/conversion/weights.ts";
import { loadModel, type NamedTensors } from "../checkpoint/model-store.ts";
import { openSafetensors } from "../checkpoint/safetensors.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { type EncoderConfig, EncoderModule } from "../models/mimo/encoder.ts";
import type { Device } from "../native/device.ts";
import { AdamW, type AdamWOptions } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { onlyReplica } from "../parallel/data-parallel.ts";
import { groupOfOne } from "../parallel/group.ts";
import { namedTopology, parseLayout } from "../parallel/layout.ts";
import { ColocatedSchedule } from "../train/colocated-schedule.ts";
import { type TrainingState, trainStep } from "../train/step.ts";
import type { Precision } from "./bf16.ts";
import type { ParityReport } from "./comparison.ts";
import { MimoBatches } from "./mimo-batches.ts";
import { compareMimoRun } from "./mimo-comparison.ts";
import { type MimoGoldenConfig, readMimoGolden } from "./mimo-golden.ts";
import { checkParticipation, planOfGolden } from "./mimo-layout-check.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./mimo-model.ts";

export interface MimoParityOptions {
	readonly onStep?: (step: number, of: number) => void;
	/** Default fp32, compared value by value; bf16 only by its losses. */
	readonly precision?: Precision;
	/** Stop after this many steps; default all. */
	readonly steps?: number;
	/** Checkpoint of any format to take the weights from; default: the folder's own. */
	readonly weights?: string | undefined;
	/** May change the encoder that config.json describes: to see whether the comparison notices. */
	readonly configure?: (config: EncoderConfig) => EncoderConfig;
}

/** Trains both modules in this process as the reference did and compares. */
export function mimoParity(device: Device, path: string, options: MimoParityOptions = {}): ParityReport {
	const { config, golden } = readMimoGolden(path);
	checkParticipation(path, config, 1);
	const batches = new MimoBatches(path, config);
	const precision = options.precision ?? "f32";
	const encoderConfig = goldenEncoderConfig(config, precision);
	using encoder = new EncoderModule(device, options.configure?.(encoderConfig) ?? encoderConfig, {
		frozenTower: config.vision.frozen,
		frozenProjector: config.projector.frozen,
	});
	using language = new HybridModel(device, goldenLanguageConfig(config, precision), { frozen: false });
	const modules: NamedTensors = {
		*logicalTensors() {
			yield* encoder.logicalTensors();
			yield* language.logicalTensors();
		},
	};
	using weights = openReferenceWeights(path, options.weights);
	loadModel(modules, weights);
	const [encoderReplica, languageReplica] = [onlyReplica(encoder.parameters), onlyReplica(language.parameters)];
	using scalars = new StepScalars(device);
	using optimizer = new AdamW([encoderReplica, languageReplica], scalars, adamOf(config));
	const world = groupOfOne("world", 0);
	const state: TrainingState<ImageTextMicrobatch> = {
		replicas: [encoderReplica, languageReplica],
		routers: [...language.routers.values()],
		routerGroup: groupOfOne("language.tp_dp", 0),
		world,
		schedule: new ColocatedSchedule(encoder, language, config.language_model.image_token_id),
		countsLoss: true,
		optimizer,
		scalars,
		clipGrad: config.optimizer.clip_grad,
		seed: 1,
		participation: { policy: config.encoder_grad_participation, ranks: 1, replica: encoderReplica, votes: true },
	};
	const run = {
		rank: 0,
		plan: planOfGolden(namedTopology(parseLayout("1")), config),
		world,
		device,
		language: { model: language, lane: 0 },
		encoder: { tp: encoder.parallel.tp, lane: 0 },
		state,
		modules,
		counts: () => true,
		train: (step: number, observer: Parameters<typeof trainStep>[2]) =>
			trainStep(state, { microbatches: batches.step(step), ...stepOf(config, step) }, observer),
	};
	return compareMimoRun(
		run,
		{ folder: path, config, golden, batches },
		{
			precision,
			steps: Math.min(options.steps ?? golden.steps.length, golden.steps.length),
			weights,
			...(options.onStep && { onStep: options.onStep }),
		},
	);
}

/** The folder's initial weights, or a checkpoint's of any format. */
export function openReferenceWeights(folder: string, weights: string | undefined) {
	return weights === undefined ? openSafetensors(join(folder, "model.safetensors")) : openWeights(weights);
}

/** The reference's optimizer; which parameters decay is the rule of `mimo train`. */
export function adamOf({ optimizer }: MimoGoldenConfig): AdamWOptions {
	return { beta1: optimizer.betas[0], beta2: optimizer.betas[1], epsilon: optimizer.eps };
}

/** What a step is told beside its microbatches. */
export function stepOf({ optimizer }: MimoGoldenConfig, step: number) {
	return { iteration: step, learningRate: optimizer.lr, weightDecay: optimizer.weight_decay };
}
