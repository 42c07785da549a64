/**
 * Trains a language model as a layer-* or hybrid-* reference folder did and compares: step 1 layer by layer, then every
 * step's loss and gradient norm. Tolerances are those of the reference runs' README.
 */

import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import {
	type Correspondence,
	familyOf,
	type HuggingFaceModel,
	languageCorrespondence,
	loadModel,
	openHuggingFaceModel,
	openSafetensors,
	openWeights,
	parsePythonJson,
} from "../../checkpoint/index.ts";
import { type ImageTextMicrobatch, nextTokenMicrobatch, withoutImages } from "../../data/microbatch.ts";
import { depthLoss } from "../../guests/mtp/mtp.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { describedConfig } from "../../models/language/from-configuration.ts";
import { hybridParameters } from "../../models/language/names.ts";
import { pooledCoefficient } from "../../models/language/pooled-balancing.ts";
import { loggedName } from "../../models/language/router-state.ts";
import { decays, type ParameterSpec } from "../../models/parameter-spec.ts";
import { decayMultiplier, type OptimizerOptions } from "../../optim/optimizer.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { bandLimit, type Check, type Precision, requireBands } from "../comparison.ts";
import { adamW, readReferenceJson, requireKeys } from "../golden-fields.ts";
import { requireCuts } from "../layout-cuts.ts";
import { checksOfStep, languageRun, type ReferenceFormat } from "../reference.ts";
import { planOf } from "../verify/samples.ts";
import { type StepOne, watchedStep } from "./probes.ts";

/** layer-* and hybrid-* folders, a training by Hugging Face transformers. */
export const languageReference: ReferenceFormat = {
	...{ hasEncoder: false, ownWeights: null, fp32Alone: null },
	holds: () => true,
	layout: () => null,
	plan: (layout, path) => {
		const { batch, seq } = readLanguageGolden(path);
		using source = openHuggingFaceModel(path);
		const config = huggingFaceConfig(source, join(path, "config.json"), "f32");
		requireCuts(layout, config, null);
		// One microbatch of all samples of a lane; with a pipeline one for each sample, unless a loss is of all samples together.
		const { lanes, shape } = layout.topology.language;
		const microBatchSize = shape.pipeline > 1 && pooledCoefficient(config) === null ? 1 : Math.ceil(batch / lanes);
		return planOf(layout, { samples: batch, microBatchSize, sequenceLength: seq });
	},
	open: (path, { plan, precision, weights: given }) => {
		const golden = readLanguageGolden(path);
		using opened = new DisposableStack();
		const source = opened.use(openHuggingFaceModel(path));
		const names = languageCorrespondence(source.configuration, source.spelling, source.weights.path);
		const alone = huggingFaceConfig(source, join(path, "config.json"), precision);
		const config = { ...alone, mtp: alone.mtp && { ...alone.mtp, lossScalingFactor: depthsFactor(golden, path) } };
		const { blocks } = familyOf(source.spelling);
		requireProbes(path, config, blocks, names, golden);
		const run = languageRun(config, golden.optimizer);
		const stepOne = stepOneOf(golden, config, blocks, names);
		const batches = readBatches(path, golden);
		const kept = opened.move();
		return {
			specification: { ...run, adam: { ...run.adam, ...decayRule(names, hybridParameters(config), golden.optimizer) } },
			optimizer: golden.optimizer,
			steps: batches.length,
			batch: (step) => batches[step]!,
			load: ({ language }, partial) => {
				if (given === null) loadModel(language!, source.weights, partial);
				else {
					using weights = openWeights(given, { ...source.configuration });
					loadModel(language!, weights, partial);
				}
			},
			before: null,
			watch: (run, index) =>
				watchedStep(stepOne, plan, run, index, {
					checks: ({ loss, losses, gradientNorm, balancing }) => {
						const expected = golden.steps[index]!;
						const check = checksOfStep(index);
						const pooled = balancing[loggedName("pooled_aux_loss")];
						const { aux_loss: aux, aux_loss_band: band } = expected;
						return [
							check("loss", expected.loss, loss, bandLimit("loss", expected.loss_band)),
							...(pooled === undefined || aux === undefined
								? []
								: [check("balancing loss", aux, pooled, bandLimit("loss", band ?? 0))]),
							...depthChecks(expected, losses, check),
							check("gradient norm", expected.grad_norm, gradientNorm, bandLimit("grad_norm", expected.grad_norm_band)),
						];
					},
				}),
			[Symbol.dispose]: () => kept.dispose(),
		};
	},
};

function stepOneOf(
	{ batch, seq, step1_probe: { layers, logits, grad_norm } }: LanguageGolden,
	{ pattern }: HybridConfig,
	blocks: number,
	names: Correspondence,
): StepOne {
	const mainLayers = pattern.length / blocks;
	const values = new Map([
		// Those of prediction depths are of the positions that have a target, and are compared by their losses and gradients.
		...layers.slice(0, mainLayers).map((probe, layer) => [`layer.${(layer + 1) * blocks - 1}`, [probe]] as const),
		["logits", [logits]],
	]);
	return { batch, seq, values, gradNorm: grad_norm, names };
}

/** Throws a UserError unless golden.json has a probe of every layer and the gradient norm of every parameter. */
function requireProbes(
	folder: string,
	config: HybridConfig,
	blocks: number,
	names: Correspondence,
	{ step1_probe: probes }: LanguageGolden,
): void {
	const path = join(folder, "golden.json");
	const layers = config.pattern.length / blocks + (config.mtp?.depths ?? 0);
	if (probes.layers.length !== layers) {
		throw new UserError(`${path}: step1_probe has ${counted(probes.layers.length, "layer")} of ${layers}.`);
	}
	const stacked = hybridParameters(config).map(({ name }) => name);
	const trained = names.links
		.filter(({ logical }) => stacked.includes(logical) || stacked.includes(logical.replace(/\d+$/, "")))
		.map(({ foreign }) => foreign);
	requireKeys(`${path}: grad_norm`, probes.grad_norm, trained);
}

/** The weight of all prediction depths together beside the language model's loss, by golden.json's objective. */
function depthsFactor({ objective }: LanguageGolden, folder: string): number {
	const factor = /^loss \+ ([\d.]+) \/ depths \* sum of mtp_k_loss$/.exec(objective ?? "")?.[1];
	if (factor !== undefined) return Number(factor);
	throw new UserError(
		`${join(folder, "golden.json")}: objective is ${JSON.stringify(objective)}, without the losses of prediction depths.`,
	);
}

/** Every depth's loss of a step: mtp_1_loss, … with their bands. */
function depthChecks(
	expected: LanguageGolden["steps"][number],
	losses: Readonly<Record<string, number>>,
	check: ReturnType<typeof checksOfStep>,
): Check[] {
	const values = Object.entries(expected).filter(([name]) => /^mtp_\d+_loss$/.test(name));
	return values.map(([name, value], depth) => {
		const band = expected[`${name}_band` as keyof typeof expected] as number | undefined;
		return check(
			depthLoss(depth),
			value as number,
			losses[depthLoss(depth)] ?? Number.NaN,
			bandLimit("loss", band ?? 0),
		);
	});
}

/** Weight decay factors of the reference's optimizer; those of `mimo train` where they are equal. */
export function decayRule(
	names: Correspondence,
	parameters: readonly ParameterSpec[],
	{ no_weight_decay }: LanguageGolden["optimizer"],
): Pick<OptimizerOptions, "weightDecayMultiplier"> {
	const excluded = new Set(no_weight_decay);
	const foreignOf = new Map(names.links.map(({ logical, foreign }) => [logical, foreign]));
	const rule = (name: string) => {
		const foreign = foreignOf.get(name) ?? foreignOf.get(`${name}0`);
		if (foreign === undefined) throw new Error(`No Hugging Face tensor corresponds to ${name}.`);
		return excluded.has(foreign) ? 0 : 1;
	};
	const same = parameters.every((spec) => rule(spec.name) === decayMultiplier(decays(spec)));
	return same ? {} : { weightDecayMultiplier: rule };
}

/** tokens i32 [steps, batch, seq + 1] as the samples of every step. */
function readBatches(folder: string, golden: LanguageGolden): ImageTextMicrobatch[][] {
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
		Array.from({ length: golden.batch }, (_, row) => {
			const begin = (step * golden.batch + row) * width;
			return withoutImages(nextTokenMicrobatch([tokens.subarray(begin, begin + width)]));
		}),
	);
}

// golden.json of a layer-* or hybrid-* folder: a language model's training run by Hugging Face transformers.

const probe = v.object({ mean: v.number(), rms: v.number(), head: v.array(v.number()) });

/** Fields that transformers' references of any kind have. */
export const transformersRun = {
	dtype: v.literal("float32"),
	optimizer: v.object({
		...adamW,
		no_weight_decay: v.array(v.string()),
	}),
	/** Steps before the first routing decision that rounding flips. */
	exact_steps: v.number(),
	batch: v.number(),
	seq: v.number(),
};

const languageGoldenSchema = v.object({
	...transformersRun,
	/** The differentiated value; absent: the loss. */
	objective: v.optional(v.string()),
	steps: v.array(
		v.looseObject({
			step: v.number(),
			loss: v.number(),
			grad_norm: v.number(),
			/** transformers' balancing loss, before its coefficient. */
			aux_loss: v.optional(v.number()),
			aux_loss_band: v.optional(v.number()),
			loss_band: v.number(),
			grad_norm_band: v.number(),
		}),
	),
	step1_probe: v.object({
		layers: v.array(probe),
		logits: probe,
		grad_norm: v.record(v.string(), v.number()),
	}),
});

type LanguageGolden = v.InferOutput<typeof languageGoldenSchema>;

/** Reads and checks golden.json; the error names the file and the field. */
export function readLanguageGolden(folder: string): LanguageGolden {
	const path = join(folder, "golden.json");
	if (!existsSync(path)) throw new UserError(`${folder} is no reference folder: golden.json is missing.`);
	const golden = readReferenceJson(languageGoldenSchema, path);
	requireBands(path, golden.exact_steps, golden.steps);
	return golden;
}

/**
 * Expert bias fixed, transformers' balancing loss where config.json asks for it; group scores from the best two experts, norms with one ε, and Δ at
 * least time_step_min (whatever use_mamba_kernels says: transformers 5 ignores it).
 */
export function huggingFaceConfig(
	{ configuration, configText }: Pick<HuggingFaceModel, "configuration" | "configText">,
	path: string,
	precision: Precision,
): HybridConfig {
	const json = parsePythonJson(configText, path);
	const timeStepMinimum = Number(json.time_step_min ?? 0.001);
	const config = describedConfig(configuration, { bf16: precision === "bf16" });
	const coefficient = json.output_router_logits === true ? Number(json.router_aux_loss_coef ?? 0.001) : 0;
	return {
		...config,
		mamba: { ...config.mamba, gatedNormEpsilon: config.normEpsilon, timeStepMinimum },
		moe: {
			...config.moe,
			groupScoreTopk: 2,
			balancing: coefficient > 0 ? [{ type: "pooled_aux_loss", coefficient }] : [],
		},
	};
}
