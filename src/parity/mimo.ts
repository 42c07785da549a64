/**
 * Trains both modules in one process as a mimo-* reference folder did and compares: step 1 value by value, then every
 * step's loss, gradient norm and balancing loss. Tolerances are those of the reference runs' README.
 */
import { join } from "node:path";
import { openWeights } from "../checkpoint/conversion/weights.ts";
import { GradientStore, loadModel, type NamedTensors } from "../checkpoint/model-store.ts";
import { openSafetensors } from "../checkpoint/safetensors.ts";
import { readTensor } from "../checkpoint/store.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { type EncoderConfig, EncoderModule } from "../models/mimo/encoder.ts";
import type { Device } from "../native/device.ts";
import { AdamW } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { onlyReplica } from "../parallel/data-parallel.ts";
import { groupOfOne } from "../parallel/group.ts";
import { ColocatedSchedule } from "../train/colocated-schedule.ts";
import { participationFactor } from "../train/participation.ts";
import { type StepResult, type TrainingState, trainStep } from "../train/step.ts";
import type { Precision } from "./bf16.ts";
import { type Check, type ParityReport, relative } from "./comparison.ts";
import { MimoBatches } from "./mimo-batches.ts";
import { type MimoGolden, type MimoGoldenConfig, readMimoGolden } from "./mimo-golden.ts";
import { checkParticipation } from "./mimo-layout-check.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./mimo-model.ts";
import { MimoProbes } from "./mimo-probes.ts";
import { compareSteps } from "./resolve-ties.ts";

export const parameterGradientLimit = 2e-5;

export interface MimoParityOptions {
	readonly onStep?: (step: number, of: number) => void;
	/** Default fp32, compared value by value; bf16 only by its losses. */
	readonly precision?: Precision;
	/** Stop after this many steps; default all. */
	readonly steps?: number;
	/** Data-parallel encoder ranks that a "corrected" folder's factor counts; default 1, this process. */
	readonly encoderRanks?: number;
	/** Checkpoint of any format to take the weights from; default: the folder's own. */
	readonly weights?: string | undefined;
	/** May change the encoder that config.json describes: to see whether the comparison notices. */
	readonly configure?: (config: EncoderConfig) => EncoderConfig;
}

/** Compares on layout `1`: this process holds both modules and accumulates the microbatches of all lanes. */
export async function mimoParity(device: Device, path: string, options: MimoParityOptions = {}): Promise<ParityReport> {
	const { config, golden } = readMimoGolden(path);
	checkParticipation(path, config, options.encoderRanks ?? 1);
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
	{
		using weights =
			options.weights === undefined ? openSafetensors(join(path, "model.safetensors")) : openWeights(options.weights);
		loadModel(modules, weights);
	}
	const [encoderReplica, languageReplica] = [onlyReplica(encoder.parameters), onlyReplica(language.parameters)];
	using scalars = new StepScalars(device);
	using optimizer = new AdamW([encoderReplica, languageReplica], scalars, {
		beta1: config.optimizer.betas[0],
		beta2: config.optimizer.betas[1],
		epsilon: config.optimizer.eps,
		weightDecayMultiplier: decayRule(config),
	});
	let step = 0;
	const state: TrainingState<ImageTextMicrobatch> = {
		replicas: [encoderReplica, languageReplica],
		routers: [...language.routers.values()],
		routerGroup: groupOfOne("language.tp_dp", 0),
		world: groupOfOne("world", 0),
		schedule: new ColocatedSchedule(encoder, language, config.language_model.image_token_id),
		countsLoss: true,
		optimizer,
		scalars,
		clipGrad: config.optimizer.clip_grad,
		seed: 1,
		...(config.encoder_grad_participation === "corrected" && {
			encoderCorrection: {
				replica: encoderReplica,
				factor: () => participationFactor(batches.participants(step), config.layout.encoder.data_parallel),
			},
		}),
	};
	const steps = Math.min(options.steps ?? golden.steps.length, golden.steps.length);
	const train = (index: number): Check[] => {
		step = index;
		options.onStep?.(step + 1, steps);
		const checks: Check[] = [];
		const probes = step === 0 ? new MimoProbes(config, golden, language, checks) : null;
		const observer = probes && {
			forward: probes.observe,
			gradients: () => compareGradients(modules, golden, checks),
		};
		const input = {
			microbatches: microbatchesOf(batches, config, step),
			iteration: step,
			learningRate: config.optimizer.lr,
			weightDecay: config.optimizer.weight_decay,
		};
		const result = trainStep(state, input, observer ?? {});
		probes?.compareExpertBias();
		compareStep(step, result, golden, checks);
		return checks;
	};
	return compareSteps(0, (own) => own, {
		folder: path,
		steps,
		precision,
		state,
		routers: language.routers,
		step: train,
	});
}

/** All lanes' microbatches of a step, lane after lane. */
export function microbatchesOf(batches: MimoBatches, { data }: MimoGoldenConfig, step: number): ImageTextMicrobatch[] {
	return Array.from({ length: data.lanes * data.microbatches_per_lane }, (_, index) =>
		batches.microbatch(step, Math.floor(index / data.microbatches_per_lane), index % data.microbatches_per_lane),
	);
}

/** Weight decay exactly where the reference's optimizer had it; experts are stacked here. */
export function decayRule({ optimizer }: MimoGoldenConfig): (name: string) => number {
	const excluded = new Set(optimizer.no_weight_decay);
	return (name) => (excluded.has(name) || excluded.has(`${name}0`) ? 0 : 1);
}

function compareGradients(modules: NamedTensors, golden: MimoGolden, checks: Check[]): void {
	using gradients = new GradientStore("the gradients", modules);
	for (const [name, expected] of Object.entries(golden.step1_probe.grad_norm)) {
		const values = readTensor(gradients, name) as Float32Array;
		const actual = Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));
		const error = relative(actual, expected);
		checks.push({ name: `step 1 gradient of ${name}`, expected, actual, error, limit: parameterGradientLimit });
	}
}

export function compareStep(step: number, result: StepResult, golden: MimoGolden, checks: Check[]): void {
	const expected = golden.steps[step]!;
	const push = (what: string, actual: number, wanted: number, limit: number) =>
		checks.push({
			name: `step ${step + 1} ${what}`,
			expected: wanted,
			actual,
			error: relative(actual, wanted),
			limit,
		});
	push("loss tokens", result.tokens, expected.loss_tokens, 0);
	push("loss", result.loss, expected.loss, Math.max(2e-6, 3 * expected.loss_band));
	push("gradient norm", result.gradientNorm, expected.grad_norm, Math.max(1e-5, 3 * expected.grad_norm_band));
	if (expected.seq_load_balancing_loss === undefined) return;
	push(
		"balancing loss",
		result.balancing.seq_load_balancing_loss ?? Number.NaN,
		expected.seq_load_balancing_loss,
		Math.max(1e-5, 3 * expected.seq_load_balancing_loss_band),
	);
}
