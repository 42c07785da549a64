/**
 * Opens a checkpoint's model for commands that do not train it. Values of the checkpoint's index or config.json are defaults
 * beneath the given configuration.
 */
import { join } from "node:path";
import {
	canonicalCheckpoint,
	describedModel,
	detectFormat,
	folderTexts,
	isCheckpoint,
	iterationName,
	NativeCheckpoint,
	openChecked,
	openPretrained,
	type Pretrained,
	placedFolder,
	readImageProcessor,
	requireTensors,
	restoreTensors,
	TrainingTensors,
} from "../checkpoint/index.ts";
import { hasEncoder } from "../config/derive.ts";
import { withoutCuts } from "../config/hybrid-pattern.ts";
import { gridKeys } from "../config/keys/parallel.ts";
import { requireSameModel } from "../config/same-model.ts";
import { type Key, propertyOf, subjects, type TrainingConfiguration } from "../config/schema.ts";
import type { Entry } from "../config/sources.ts";
import { topologyOf, type World } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { assemble, type Run } from "../train/assemble.ts";
import { specificationOf } from "../train/from-configuration.ts";
import { loadFolders, openFolders } from "../train/restart/hugging-face.ts";
import { loadAdapters } from "../train/restart/peft.ts";

/** How a training on ranks of their own encodes ahead: keys of the subject Vision that other layouts refuse. */
const encodingAhead: readonly Key[] = [
	"mimo-encoder-prefetch",
	"mimo-encoder-prefetch-depth",
	"mimo-encoder-prefetch-debug",
];

/** Configuration keys of a checkpoint that describe its model and how text and images become its input. */
const describing = [
	...[
		"Language model",
		"Multi-latent attention",
		"Mamba-2 layers",
		"Gated DeltaNet layers",
		"Mixture of experts",
		"Elastic models",
		"Vision",
		"Energon data",
	].flatMap((subject) => Object.keys(subjects[subject as keyof typeof subjects])),
	"lora-rank",
	"lora-alpha",
	"lora-target-modules",
	"bf16",
	...Object.keys(subjects.Tokenizer),
] as readonly Key[];

/** The last value given for a key of text. */
function textOf(given: readonly Entry[], key: Key): string | null {
	const value = given.findLast((entry) => entry.key === key)?.value;
	return typeof value === "string" ? value : null;
}

/** Entries beneath all others that describe the model of the checkpoint that `given` names. */
export function checkpointEntries(given: readonly Entry[]): Entry[] {
	const load = textOf(given, "load");
	const loadHf = textOf(given, "load-hf");
	if (load === null && loadHf === null) {
		throw new UserError(
			"The weights have to be named: --load with a checkpoint of `mimo train`, or --load-hf with a Hugging Face folder.",
			exitCodes.usage,
		);
	}
	if (load !== null && loadHf !== null) {
		throw new UserError("--load and --load-hf both name weights; allowed is one of them.", exitCodes.usage);
	}
	const step = given.findLast(({ key }) => key === "ckpt-step")?.value;
	const iteration = load !== null && typeof step === "number" ? step : null;
	const path = placedFolder(load ?? loadHf!, textOf(given, "staging-dir"), iteration);
	const model = load === null ? folderValues(path) : nativeValues(path, iteration);
	// A given template takes the place of the text around turns that the checkpoint was trained with.
	if (textOf(given, "chat-template") !== null) delete model["conversation-template"];
	// Without grids, one process holds the encoder too.
	const layout = given.some(({ key }) => gridKeys.some((grid) => grid === key)) ? {} : { "llm-offset": 0 };
	// Ranks that share a lane each need a sample.
	const sharing = given.findLast(({ key }) => key === "encoder-dp")?.value ?? 1;
	const values: Partial<Record<Key, unknown>> = { "micro-batch-size": sharing, ...layout, ...model };
	return Object.entries(values).map(([key, value]) => ({
		key: key as Key,
		value,
		origin: { source: "checkpoint", path },
	}));
}

function requireNative(path: string): void {
	if (isCheckpoint(path)) return;
	const format = detectFormat(path);
	const hint =
		format === "hf"
			? "a Hugging Face folder; --load-hf takes those"
			: format === null
				? "no checkpoint"
				: `a ${format} checkpoint; \`mimo convert-ckpt --to native ${path} TARGET\` makes one that can be loaded`;
	throw new UserError(`${path} (load) is ${hint}.`);
}

function nativeValues(path: string, step: number | null): Partial<Record<Key, unknown>> {
	requireNative(path);
	using checkpoint = NativeCheckpoint.openExactly(step === null ? path : join(path, iterationName(step)));
	const model = describedModel(checkpoint.manifest);
	const values: Partial<Record<Key, unknown>> = {};
	for (const key of describing) {
		const value = encodingAhead.includes(key) ? null : model[propertyOf(key)];
		if (value !== undefined && value !== null) values[key] = value;
	}
	// The pipeline cuts of the training do not matter here.
	const pattern = values["hybrid-layer-pattern"];
	if (typeof pattern === "string") values["hybrid-layer-pattern"] = withoutCuts(pattern);
	return values;
}

/**
 * Values of a folder for the model's use: length, type, chat template. The keys that make the model are read with the
 * configuration.
 */
function folderValues(path: string): Partial<Record<Key, unknown>> {
	using pretrained = openPretrained({ loadHf: path, loadVision: null, loadProjector: null });
	const { weights, language, tower } = pretrained!;
	const { dtype } = weights.tensors.values().next().value!;
	const positions = language!.language!.configuration.maxPositionEmbeddings;
	// The context limits the patches of an image.
	const context = tower === null ? null : readImageProcessor(folderTexts(tower)).contextLength;
	return {
		"seq-length": Math.min(positions, context || positions),
		"max-position-embeddings": positions,
		bf16: dtype === "BF16",
	};
}

/** Weights that nothing trains: no gradients, no optimizer. Every rank of the world calls this together. */
export async function openModel(c: TrainingConfiguration, world: World, say: (sentence: string) => void): Promise<Run> {
	if (c.modules.length > 0) {
		throw new UserError(
			"The model has further encoders (modules); it can be trained and verified, but not decoded yet.",
		);
	}
	if (c.loraRank !== null && c.load === null && c.loadPeft === null) {
		throw new UserError(
			"--lora-rank asks for adapters, which a Hugging Face folder does not have: give --load-peft.",
			exitCodes.usage,
		);
	}
	const specification = specificationOf(c, world.rank);
	const frozen = { tower: true, projector: true };
	const run = await assemble(
		{
			...specification,
			encoders: specification.encoders.map((encoder) => ({ ...encoder, frozen })),
			frozenLanguage: true,
			distributedOptimizer: false,
			buckets: () => null,
		},
		topologyOf(c),
		world,
	);
	if (c.load !== null) restore(c, c.load, run, say);
	else {
		using pretrained = openFolders(c)!;
		requireWhole(c, pretrained);
		loadFolders(run, pretrained);
	}
	loadAdapters(c, run);
	return run;
}

/** A model whose parts do not all come from folders would have to be trained first. */
function requireWhole(c: TrainingConfiguration, { tower, projector }: Pretrained): void {
	if (!hasEncoder(c) || (tower !== null && projector !== null)) return;
	const [what, flag] = tower === null ? ["vision tower", "--load-vision"] : ["projector", "--load-projector"];
	throw new UserError(
		`${c.loadHf} (load-hf) holds no ${what}, and none is named: ${flag} names one, or \`mimo train\` trains a new one.`,
	);
}

function restore(c: TrainingConfiguration, path: string, run: Run, say: (sentence: string) => void): void {
	const { state } = run;
	const choice = {
		path: placedFolder(path, c.stagingDir, c.ckptStep),
		iteration: c.ckptStep,
		allowFallback: c.allowFallback,
	};
	using checkpoint = canonicalCheckpoint(openChecked(choice, state.world, say));
	requireSameModel(checkpoint.path, describedModel(checkpoint.manifest), { ...c });
	using tensors = new TrainingTensors({
		replicas: state.replicas,
		logicalTensors: () => run.logicalTensors(),
		optimizer: null,
		writesLoose: false,
	});
	requireTensors(tensors, checkpoint, false, state.world);
	restoreTensors(tensors, checkpoint, { optimizer: false });
}
