/**
 * Trains a language model as a layer-* or hybrid-* reference folder did and compares: step 1 layer by layer, then every
 * step's loss and gradient norm. Tolerances are those of the reference runs' README.
 */

import { join } from "node:path";
import { openWeights } from "../checkpoint/conversion/weights.ts";
import { languageCorrespondence } from "../checkpoint/hf/language-names.ts";
import { openHuggingFaceModel } from "../checkpoint/hf/model.ts";
import { type Correspondence, MappedStore, planTensors } from "../checkpoint/mapping.ts";
import { GradientStore, loadModel } from "../checkpoint/model-store.ts";
import { openSafetensors } from "../checkpoint/safetensors.ts";
import { readTensor } from "../checkpoint/store.ts";
import { type Microbatch, nextTokenMicrobatch, withoutImages } from "../data/microbatch.ts";
import type { HybridConfig } from "../models/hybrid/config.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { hybridParameters } from "../models/hybrid/names.ts";
import { decays } from "../models/parameter-spec.ts";
import type { Device } from "../native/device.ts";
import { UserError } from "../native/errors.ts";
import { type AdamWOptions, decayMultiplier } from "../optim/adamw.ts";
import type { DataParallel } from "../parallel/data-parallel.ts";
import { groupOfOne } from "../parallel/group.ts";
import { languageAlone, topologyOfLayout } from "../parallel/layout.ts";
import { World } from "../parallel/world.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { assemble, type RunSpecification } from "../train/assemble.ts";
import { type StepInput, trainStep } from "../train/step.ts";
import { bandLimit } from "./bands.ts";
import type { Precision } from "./bf16.ts";
import { type Check, type ParityReport, relative } from "./comparison.ts";
import { type LanguageGolden, type Probe, readLanguageGolden } from "./language-golden.ts";
import { huggingFaceConfig } from "./language-model.ts";
import { ProbeSums } from "./probe-sums.ts";
import { requireKeys } from "./required-keys.ts";
import { compareSteps } from "./resolve-ties.ts";

const parameterGradientLimit = 2e-5;

export interface LanguageParityOptions {
	readonly onStep?: (step: number, of: number) => void;
	/** Default fp32, compared value by value; bf16 only by its losses. */
	readonly precision?: Precision;
	/** Checkpoint of any format to take the weights from; default: the folder's own. */
	readonly weights?: string | undefined;
	/** May change the model that config.json describes: to see whether the comparison notices. */
	readonly configure?: (config: HybridConfig) => HybridConfig;
}

export async function languageParity(
	device: Device,
	path: string,
	options: LanguageParityOptions = {},
): Promise<ParityReport> {
	const golden = readLanguageGolden(path);
	using source = openHuggingFaceModel(path);
	const names = languageCorrespondence(source.configuration, source.spelling, source.weights.path);
	const { precision = "f32" } = options;
	const config = huggingFaceConfig(source, join(path, "config.json"), precision);
	const specification: RunSpecification = {
		...{ encoder: null, imageTokenId: null, clipGrad: golden.optimizer.clip_grad, seed: 1 },
		language: options.configure?.(config) ?? config,
		frozen: { tower: true, projector: true, language: false },
		adam: {
			beta1: golden.optimizer.betas[0],
			beta2: golden.optimizer.betas[1],
			epsilon: golden.optimizer.eps,
			...decayRule(names, config, golden),
		},
	};
	using run = await assemble(specification, topologyOfLayout(languageAlone), World.alone(device));
	const { state } = run;
	const model = run.language!;
	if (options.weights === undefined) loadModel(model, source.weights);
	else {
		using weights = openWeights(options.weights, { ...source.configuration });
		loadModel(model, weights);
	}
	state.optimizer.refreshMasters();
	requireProbes(path, config, names, state.replicas[0]!, golden);
	const batches = readBatches(path, golden);
	const train = (index: number): Check[] => {
		options.onStep?.(index + 1, golden.steps.length);
		const checks: Check[] = [];
		const input: StepInput = {
			microbatches: [withoutImages(batches[index]!)],
			iteration: index,
			learningRate: golden.optimizer.lr,
			weightDecay: golden.optimizer.weight_decay,
		};
		const observer = index === 0 ? stepOneObserver(names, model, golden, checks) : {};
		const result = trainStep(state, input, observer);
		const expected = golden.steps[index]!;
		checks.push(
			{
				name: `step ${index + 1} loss`,
				expected: expected.loss,
				actual: result.loss,
				error: relative(result.loss, expected.loss),
				limit: bandLimit("loss", expected.loss_band),
			},
			{
				name: `step ${index + 1} gradient norm`,
				expected: expected.grad_norm,
				actual: result.gradientNorm,
				error: relative(result.gradientNorm, expected.grad_norm),
				limit: bandLimit("grad_norm", expected.grad_norm_band),
			},
		);
		return checks;
	};
	const steps = golden.steps.length;
	return compareSteps(0, (own) => own, { folder: path, steps, precision, state, routers: model.routers, step: train });
}

/** Compares hidden states, logits and parameter gradients of step 1 as they arise. */
function stepOneObserver(names: Correspondence, model: HybridModel, golden: LanguageGolden, checks: Check[]) {
	return {
		forward: (name: string, value: Tensor) => {
			const layer = /^layer\.(\d+)$/.exec(name);
			if (layer)
				checks.push(probeCheck(`step 1 layer ${layer[1]}`, value, golden.step1_probe.layers[Number(layer[1])]!));
			if (name === "logits") {
				using live = value.columns(0, model.config.vocabularySize);
				checks.push(probeCheck("step 1 logits", live, golden.step1_probe.logits));
			}
		},
		gradients: () => {
			const logical = new GradientStore("the gradients", model);
			using gradients = new MappedStore(logical, planTensors(logical, names, "foreign"));
			for (const [name, expected] of Object.entries(golden.step1_probe.grad_norm)) {
				const values = readTensor(gradients, name) as Float32Array;
				const actual = Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));
				const error = relative(actual, expected);
				checks.push({ name: `step 1 gradient of ${name}`, expected, actual, error, limit: parameterGradientLimit });
			}
		},
	};
}

/** Mean, rms and first values against the reference's. */
function probeCheck(name: string, value: Tensor, expected: Probe): Check {
	const sums = new ProbeSums([{ name, elements: value.elements, ...expected }]);
	sums.add(0, value.toFloat32(), 0);
	return sums.checks(groupOfOne("parity", 0), value.device)[0]!;
}

/** Throws a UserError unless golden.json has a probe of every layer and the gradient norm of every parameter. */
function requireProbes(
	folder: string,
	{ pattern }: HybridConfig,
	names: Correspondence,
	replica: DataParallel,
	{ step1_probe: probes }: LanguageGolden,
): void {
	const path = join(folder, "golden.json");
	if (probes.layers.length !== pattern.length) {
		throw new UserError(`${path}: step1_probe has ${probes.layers.length} layers of ${pattern.length}.`);
	}
	const stacked = replica.parameters.buffers.flatMap(({ entries }) => entries.map(({ name }) => name));
	const trained = names.links
		.filter(({ logical }) => stacked.includes(logical) || stacked.includes(logical.replace(/\d+$/, "")))
		.map(({ foreign }) => foreign);
	requireKeys(`${path}: grad_norm`, probes.grad_norm, trained);
}

/** Weight decay where the reference's optimizer had it: the rule of `mimo train` where that is the same. */
function decayRule(
	names: Correspondence,
	config: HybridConfig,
	golden: LanguageGolden,
): Pick<AdamWOptions, "weightDecayMultiplier"> {
	const excluded = new Set(golden.optimizer.no_weight_decay);
	const foreignOf = new Map(names.links.map(({ logical, foreign }) => [logical, foreign]));
	const rule = (name: string) => {
		const foreign = foreignOf.get(name) ?? foreignOf.get(`${name}0`);
		if (foreign === undefined) throw new Error(`No Hugging Face tensor corresponds to ${name}.`);
		return excluded.has(foreign) ? 0 : 1;
	};
	const same = hybridParameters(config).every((spec) => rule(spec.name) === decayMultiplier(decays(spec)));
	return same ? {} : { weightDecayMultiplier: rule };
}

/** tokens i32 [steps, batch, seq + 1] as one microbatch a step. */
function readBatches(folder: string, golden: LanguageGolden): Microbatch[] {
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const information = file.information("tokens");
	const shape = [golden.steps.length, golden.batch, golden.seq + 1];
	if (information.dtype !== "I32" || String(information.shape) !== String(shape)) {
		throw new UserError(
			`tokens in ${file.path} is ${information.dtype} [${information.shape}]; golden.json needs I32 [${shape}].`,
		);
	}
	const tokens = file.read("tokens") as Int32Array;
	const width = golden.seq + 1;
	return golden.steps.map((_, step) =>
		nextTokenMicrobatch(
			Array.from({ length: golden.batch }, (_, row) => {
				const begin = (step * golden.batch + row) * width;
				return tokens.subarray(begin, begin + width);
			}),
		),
	);
}
