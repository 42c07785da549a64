/** Vision-language models that Hugging Face transformers trained, on any layout. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import {
	describeParts,
	type FolderParts,
	familyOf,
	folderTexts,
	languageKey,
	loadModel,
	namesOf,
	openParts,
	openWeights,
	readImageProcessor,
} from "../../checkpoint/index.ts";
import { anyResolution } from "../../data/vision-language/from-configuration.ts";
import type { ImageSizing } from "../../data/vision-language/image-plan.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridParameters } from "../../models/language/names.ts";
import type { EncoderConfig } from "../../models/vision/encoder.ts";
import { describedEncoder } from "../../models/vision/from-configuration.ts";
import { projectorParameters } from "../../models/vision/projector.ts";
import { visionEncoder } from "../../models/vit/tower.ts";
import { visionModule } from "../../parallel/index.ts";
import { bandLimit, type Precision, requireBands } from "../comparison.ts";
import { configurationHas, readReferenceJson, requireKeys } from "../golden-fields.ts";
import { decayRule, huggingFaceConfig, transformersRun } from "../language/parity.ts";
import { watchedStep } from "../language/probes.ts";
import { requireCuts } from "../layout-cuts.ts";
import { checksOfStep, type ReferenceFormat, trainedBy } from "../reference.ts";
import { planOf } from "../verify/samples.ts";
import { readPictureBatches } from "./batches.ts";
import { EncoderProbes } from "./probes.ts";

/** A true gradient of zero, such as that of a key's bias, is this large by rounding. */
const gradNormRounding = 1e-7;

/** Largest band of a gradient norm: keys that Gated DeltaNet normalises move it by 4.4e-5 between equally right runs. */
const gradNormBand = 5e-5;

export const picturesReference: ReferenceFormat = {
	...{ hasEncoder: true, ownWeights: null, fp32Alone: null },
	holds: (path) => configurationHas(path, "vision_config") && existsSync(join(path, "golden.json")),
	layout: () => null,
	plan: (layout, path) => {
		const { batch, seq } = readGolden(path);
		using parts = openParts(path, { visionHeads: null });
		const { language, encoder } = modelOf(parts, "f32");
		requireCuts(layout, language, encoder);
		const { lanes, shape } = layout.topology.language;
		const microBatchSize = shape.pipeline > 1 ? 1 : Math.ceil(batch / lanes);
		return planOf(layout, { samples: batch, microBatchSize, sequenceLength: seq });
	},
	open: (path, { plan, precision, weights: given }) => {
		const golden = readGolden(path);
		const { step1_probe: probes } = golden;
		using opened = new DisposableStack();
		const parts = opened.use(openParts(path, { visionHeads: null }));
		const { language, encoder } = modelOf(parts, precision);
		const encoderParts = visionEncoder(encoder);
		const names = namesOf(parts);
		const specs = [
			...hybridParameters(language),
			...encoderParts.tower.parameters(),
			...projectorParameters(encoder.projector, visionModule),
		];
		// Routers' biases move by counts of tokens.
		const trained = names.links.map(({ foreign }) => foreign).filter((name) => !name.endsWith("correction_bias"));
		requireKeys(`${join(path, "golden.json")}: grad_norm`, probes.grad_norm, trained);
		const { batch, seq, optimizer } = golden;
		const batches = readPictureBatches(path, {
			...{ steps: golden.steps.length, batch, seq, placeholder: parts.imageTokenId!, tower: encoderParts.tower },
			...{ config: encoder.tower, mrope: language.attention.mropeSection !== null },
			sizing: encoder.projector.newline ? sizingOf(parts) : null,
		});
		const run = trainedBy(optimizer);
		const stepOne = {
			...{ batch, seq, gradNorm: probes.grad_norm, names },
			values: languageValues(golden, language, familyOf(parts.language!.spelling).blocks),
			...{ gradNormRounding, config: language },
		};
		const kept = opened.move();
		return {
			specification: {
				...run,
				adam: { ...run.adam, ...decayRule(names, specs, optimizer) },
				encoders: [
					{
						parts: encoderParts,
						placeholderId: parts.imageTokenId!,
						frozen: { tower: false, projector: false },
					},
				],
				language,
			},
			optimizer,
			steps: batches.length,
			batch: (step) => batches[step]!,
			load: (run, partial) => {
				if (given === null) loadModel(run, parts.weights, partial);
				else {
					using weights = openWeights(given, describeParts(parts));
					loadModel(run, weights, partial);
				}
			},
			before: null,
			watch: (run, index) => {
				const { tower } = encoderParts;
				const encoded = index === 0 ? new EncoderProbes(probes.activations, batches[0]!, { run, plan, tower }) : null;
				const language = watchedStep(stepOne, plan, run, index, {
					checks: ({ loss, gradientNorm }) => {
						const expected = golden.steps[index]!;
						const check = checksOfStep(index);
						return [
							check("loss", expected.loss, loss, bandLimit("loss", expected.loss_band)),
							check("gradient norm", expected.grad_norm, gradientNorm, bandLimit("grad_norm", expected.grad_norm_band)),
						];
					},
				});
				if (encoded === null) return language;
				return {
					...language,
					forward: (...value) => {
						encoded.observe(...value);
						language.forward!(...value);
					},
					checks: (result) => [...encoded.checks(), ...language.checks(result)],
				};
			},
			[Symbol.dispose]: () => kept.dispose(),
		};
	},
};

/** The model that a folder's config.json describes. */
export function modelOf(
	parts: FolderParts,
	precision: Precision,
): { readonly language: HybridConfig; readonly encoder: EncoderConfig } {
	const { json, configPath } = parts;
	const { configuration } = parts.language!;
	const configText = JSON.stringify(json[languageKey(json)!]);
	return {
		language: huggingFaceConfig({ configuration, configText }, configPath, precision),
		encoder: describedEncoder(describeParts(parts) as unknown as Parameters<typeof describedEncoder>[0], {
			bf16: precision === "bf16",
		}),
	};
}

/** Sizes of images as the folder's processor says them. */
export function sizingOf(parts: FolderParts): ImageSizing {
	const { keys } = readImageProcessor(folderTexts(parts));
	const value = (key: keyof typeof keys) => keys[key]!.value;
	return anyResolution({
		imageGridPinpoints: value("image-grid-pinpoints") as readonly string[],
		imgH: value("img-h") as number,
		maxAnyresTiles: value("max-anyres-tiles") as number,
	});
}

/** The language model's recorded values by the names that it observes. */
function languageValues({ step1_probe: { activations } }: PicturesGolden, { pattern }: HybridConfig, blocks: number) {
	const known: [theirs: string, ours: string][] = [
		["language.layer.0.input", "embedding"],
		// DeepStack's rows are in the next layer's input.
		...Array.from({ length: pattern.length / blocks }, (_, layer): [string, string] => {
			const next = `language.layer.${layer + 1}.input`;
			return [next in activations ? next : `language.layer.${layer}`, `layer.${(layer + 1) * blocks - 1}`];
		}),
		["language.norm", "final_norm"],
		["logits", "logits"],
	];
	return new Map(known.map(([theirs, ours]) => [ours, [activations[theirs]!]]));
}

const probe = v.object({
	shape: v.array(v.number()),
	...{ mean: v.number(), rms: v.number(), wave: v.number(), head: v.array(v.number()) },
});

const goldenSchema = v.object({
	...transformersRun,
	steps: v.array(
		v.object({ loss: v.number(), grad_norm: v.number(), loss_band: v.number(), grad_norm_band: v.number() }),
	),
	step1_probe: v.object({ activations: v.record(v.string(), probe), grad_norm: v.record(v.string(), v.number()) }),
});

type PicturesGolden = v.InferOutput<typeof goldenSchema>;

function readGolden(folder: string): PicturesGolden {
	const path = join(folder, "golden.json");
	const golden = readReferenceJson(goldenSchema, path);
	requireBands(path, golden.exact_steps, golden.steps, { exactGradNorm: gradNormBand });
	return golden;
}
