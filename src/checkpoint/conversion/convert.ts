/**
 * Conversion between checkpoint formats: open the source under canonical names, plan the target (names, shapes, every
 * tensor used exactly once), then stream the values. Memory holds pieces, not tensors (docs/spec/checkpoint.md §6.8,
 * §8.4).
 */
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { type ModelDescription, requireSameModel } from "../../config/same-model.ts";
import { type Library, openLibrary } from "../../native/library.ts";
import { UserError } from "../../system/errors.ts";
import { type DtypeTag, elementCount, isFloatDtype } from "../dtype.ts";
import { type Durability, writeFileAtomically } from "../files.ts";
import { requireEmptyTarget } from "../folders.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import type { SpellingName } from "../hf/families/nemotron-h-names.ts";
import { MergedStore, requireFinite } from "../lora/adapters.ts";
import { MappedStore, type MappedTensor } from "../mapping.ts";
import { formatName, latestName, type NativeLayout, sortedJson } from "../native/manifest.ts";
import { NativeCheckpoint } from "../native/reader.ts";
import { defaultFileBytes, iterationName, type ShardEntry, writeIndex, writeShard } from "../native/writer.ts";
import { isStoreUrl } from "../remote/store-address.ts";
import { writeFolder } from "../remote/stored-folder.ts";
import { bytesOfType, ConvertedStore, readPieces, selectTensors, type TensorStore } from "../store.ts";
import { isJsonObject } from "../torch-dist/common.ts";
import { tracker } from "../torch-dist/folder.ts";
import {
	adaptedWeights,
	huggingFaceTarget,
	openHuggingFaceSource,
	peftTarget,
	type TargetName,
} from "./hugging-face.ts";
import { fromLayout, type LayerNames, type StoredLayout, toLayout } from "./layouts.ts";
import {
	type FormatName,
	type JsonObject,
	requireFormat,
	type SourceCheckpoint,
	type SourceOptions,
	type StoredObject,
} from "./source.ts";
import { openTorchDistSource, torchDistTarget } from "./torch-dist.ts";

export function openSource(path: string, format: FormatName, options: SourceOptions): SourceCheckpoint {
	if (format === "hf") return openHuggingFaceSource(path, options);
	return format === "native" ? openNativeSource(path, options) : openTorchDistSource(path, options);
}

export interface ConversionOptions extends SourceOptions, Durability {
	readonly from: FormatName;
	readonly to: TargetName;
	readonly source: string;
	readonly target: string;
	/** PEFT folder whose adapters are merged into the source's weights; null: none. */
	readonly adapters: string | null;
	/** Replace a target that is not empty. */
	readonly force: boolean;
	/** --staging-dir. */
	readonly staging: string | null;
	/** Float type of weights; null: as stored. Vectors that want float32 and optimizer state stay as they are. */
	readonly dtype: DtypeTag | null;
	readonly names: SpellingName | null;
	readonly reference: string | null;
	readonly layout: NativeLayout;
	/** Numbering of layers in a torch_dist target; null: as in the source, physical otherwise. */
	readonly layerNames: LayerNames | null;
	readonly wrapper: string | null;
	/** Rows of embedding and output layer; null: as stored. */
	readonly paddedVocabularySize: number | null;
	readonly shardBytes: number;
	/** Tensors to leave out. */
	readonly drop: readonly string[];
	readonly generator: string;
}

export interface PlannedConversion extends Disposable {
	readonly source: SourceCheckpoint;
	/** Canonical tensors that are written, after --dtype, --drop and padding. */
	readonly weights: TensorStore;
	/** The target's tensors under its own names. */
	readonly tensors: TensorStore;
	readonly bytes: number;
	/** Whether the target, read again, has its tensors under other canonical names, as a GPT model has. */
	readonly otherNames: boolean;
	/** Sentences about the source, by which nothing is lost. */
	readonly notices: readonly string[];
	/** Sentences about what is lost, or is not what was asked for. */
	readonly warnings: readonly string[];
	/** Writes the target; `onBytes` is called with the progress. Returns the target's path. */
	readonly run: (onBytes: (bytes: number) => void) => Promise<string>;
}

/**
 * Opens the source and plans the target; nothing is written. `opened`: a checkpoint made of the source, which is written in its
 * place; the plan owns it.
 */
export function planConversion(options: ConversionOptions, opened: SourceCheckpoint | null = null): PlannedConversion {
	if (!options.force) requireEmptyTarget(options.target);
	const source = opened ?? openSource(options.source, options.from, options);
	try {
		const weights = selectWeights(source, options);
		const router = [...source.weights.tensors.keys()].some((name) => isRouterName(name));
		const left = router && !keepsRouter(options.to);
		const { tensors, run, warnings = [], otherNames = false } = planTarget(source, weights, options);
		const bytes = [...tensors.tensors.values()].reduce((sum, type) => sum + bytesOfType(type), 0);
		return {
			...{
				source,
				weights,
				tensors,
				bytes,
				otherNames,
				notices: source.notices,
				warnings: [...source.warnings, ...warnings, ...(left ? [routerWarning(source.path)] : [])],
			},
			run: async (onBytes) => {
				await source.prepare?.();
				return await run(onBytes);
			},
			[Symbol.dispose]: () => source[Symbol.dispose](),
		};
	} catch (error) {
		source[Symbol.dispose]();
		throw error;
	}
}

/** An elastic parent's router, which Hugging Face's formats have no place for. */
const keepsRouter = (to: TargetName) => to === "native" || to === "torch_dist";
const isRouterName = (name: string) => /^(optimizer\.state\.[^.]+\.)?elastic_router\./.test(name);
const routerWarning = (path: string) => `The elastic router of ${path} is left out: the format has no place for it.`;

/** Stored in float32 by every implementation, whatever the weights are in. */
const keepsFloat32 = /^elastic_router\.|\.(expert_bias|A_log|D|dt_bias)$/;

function selectWeights(source: SourceCheckpoint, options: ConversionOptions): TensorStore {
	const unused = new Set(options.drop);
	const globs = options.drop.map((pattern) => ({ pattern, glob: new Bun.Glob(pattern) }));
	const hf = options.to === "hf";
	const adapted = adaptedWeights(source, options.to, options.adapters);
	let weights = selectTensors(adapted, (name) => {
		const dropped = globs.find(({ glob }) => glob.match(name));
		if (dropped) unused.delete(dropped.pattern);
		if (isRouterName(name) && !keepsRouter(options.to)) return false;
		return !dropped && !(hf && name.startsWith("optimizer."));
	});
	for (const pattern of unused) throw new UserError(`--drop ${pattern} matches no tensor of ${source.path}.`);
	if (options.paddedVocabularySize !== null) {
		weights = padVocabulary(weights, options.paddedVocabularySize, source);
	}
	const { dtype } = options;
	if (dtype !== null) {
		weights = new ConvertedStore(weights, (name, type) => {
			const fixed = name.startsWith("optimizer.") || keepsFloat32.test(name) || !isFloatDtype(type.dtype);
			return fixed ? type.dtype : dtype;
		});
	}
	return adapted instanceof MergedStore ? requireFinite(weights, adapted) : weights;
}

function planTarget(
	source: SourceCheckpoint,
	weights: TensorStore,
	options: ConversionOptions,
): Pick<PlannedConversion, "tensors" | "run"> & {
	readonly warnings?: readonly string[];
	readonly otherNames?: boolean;
} {
	const { target, force: replace, staging, sync } = options;
	const place = { lineage: null, replace, staging, sync };
	if (options.to === "peft") {
		const planned = peftTarget(source, weights, target, options);
		return {
			...planned,
			run: async (onBytes) => {
				await writeFolder(target, place, (folder) => planned.write(folder, onBytes));
				return target;
			},
		};
	}
	if (options.to === "hf") {
		const planned = huggingFaceTarget(source, weights, target, options);
		return {
			tensors: planned.tensors,
			run: async (onBytes) => {
				await writeFolder(target, place, (folder) => planned.write(folder, onBytes));
				return target;
			},
		};
	}
	if (options.to === "native") {
		const planned = nativeTarget(source, weights, target, options);
		const name = iterationName(source.iteration);
		return {
			tensors: planned.tensors,
			run: async (onBytes) => {
				const library = await openLibrary("cpu");
				await writeFolder(target, place, (root) => {
					const folder = join(root, name);
					mkdirSync(join(folder, "data"), { recursive: true });
					const { indexSha256 } = planned.write(folder, onBytes, library);
					const latest: JsonObject = { format: formatName, iteration: source.iteration, dir: name, indexSha256 };
					writeText(join(root, latestName), `${sortedJson(latest)}\n`, sync);
				});
				return isStoreUrl(target) ? `${target}/${name}` : join(target, name);
			},
		};
	}
	const planned = torchDistTarget(source, weights, target, options);
	return {
		...{ tensors: planned.tensors, warnings: planned.warnings, otherNames: planned.otherNames },
		run: async (onBytes) => {
			await writeFolder(target, place, (root) => {
				const folder = join(root, planned.folder);
				mkdirSync(folder);
				planned.write(folder, onBytes);
				writeText(join(root, tracker), planned.tracker, sync);
			});
			return isStoreUrl(target) ? `${target}/${planned.folder}` : join(target, planned.folder);
		},
	};
}

function writeText(path: string, text: string, sync: Durability["sync"]): void {
	writeFileAtomically(path, (file) => file.write(new TextEncoder().encode(text)), { sync });
}

// Rows of embedding and output layer beside the vocabulary's (docs/spec/checkpoint.md §5.4).

const vocabularyTensor =
	/^(?:optimizer\.state\.[^.]+\.)?language_model\.(?:embedding\.word_embeddings|output_layer)\.weight$/;

/** The tensors of `weights`; tensors with a row for each token get `rows` rows: zeros are added, or padding rows cut off. */
function padVocabulary(weights: TensorStore, rows: number, source: SourceCheckpoint): TensorStore {
	const least = source.configuration?.vocabSize ?? 0;
	if (rows < least) throw new UserError(`${rows} rows are too few for a vocabulary of ${least} tokens.`);
	const plan = [...weights.tensors].map(([name, { dtype, shape }]): MappedTensor => {
		const kept = vocabularyTensor.test(name) ? Math.min(rows, shape[0]!) : (shape[0] ?? 1);
		const length = (elementCount(shape)! / (shape[0] || 1)) * kept || elementCount(shape)!;
		const whole = { offset: 0, stride: length };
		return {
			name,
			dtype,
			shape: vocabularyTensor.test(name) ? shape.with(0, rows) : shape,
			copies: [{ source: name, from: whole, to: whole, count: 1, length }],
		};
	});
	return new MappedStore(weights, plan);
}

/**
 * Opens the model tensors of `path`, a Hugging Face folder, a native or a torch_dist checkpoint. Throws a UserError where it
 * says that they are of another model than `expected`.
 */
export function openWeights(path: string, expected: ModelDescription = {}): TensorStore {
	const { weights, model } = openSource(path, requireFormat(path, null), {
		optimizer: false,
		allowFallback: false,
		visionHeads: null,
		newLayers: { seed: 0, sizes: {} },
		pattern: null,
		inert: [],
	});
	requireSameModel(path, model, expected);
	return weights;
}

// Native checkpoints as source and target of conversions.

function openNativeSource(path: string, options: SourceOptions): SourceCheckpoint {
	const checkpoint = NativeCheckpoint.open(path, { allowFallback: options.allowFallback });
	try {
		const { manifest } = checkpoint;
		const wanted = selectTensors(checkpoint, (name) => options.optimizer || !name.startsWith("optimizer."));
		const weights = fromLayout(wanted, { ...manifest.layout, gluTensorParallel: 1 }, checkpoint.path);
		const objects = new Map<string, StoredObject>(
			Object.entries(manifest.objects).map(([name, { encoding }]) => [
				name,
				{ encoding, bytes: checkpoint.readObject(name) },
			]),
		);
		return {
			format: "native",
			path: checkpoint.path,
			notices: [],
			warnings: checkpoint.notice === null ? [] : [checkpoint.notice],
			weights,
			stored: checkpoint,
			configuration: isLanguageModel(manifest.model) ? manifest.model : null,
			model: manifest.model,
			iteration: manifest.iteration,
			common: manifest.common,
			spelling: manifest.source,
			objects,
			[Symbol.dispose]: () => checkpoint[Symbol.dispose](),
		};
	} catch (error) {
		checkpoint[Symbol.dispose]();
		throw error;
	}
}

function isLanguageModel(model: object): model is LanguageModelConfiguration {
	return isJsonObject(model as never) && "hybridLayerPattern" in model && "hiddenSize" in model;
}

interface NativeTarget {
	readonly tensors: TensorStore;
	/** Fills a new folder; `library` hashes the written bytes. */
	readonly write: (
		folder: string,
		onBytes: (bytes: number) => void,
		library: Library,
	) => { readonly indexSha256: string };
}

/** Plans an iteration's folder for a source's tensors. */
function nativeTarget(
	source: SourceCheckpoint,
	weights: TensorStore,
	path: string,
	options: { readonly layout: NativeLayout; readonly shardBytes: number; readonly generator: string } & Durability,
): NativeTarget {
	const layout: StoredLayout = { ...options.layout, gluTensorParallel: 1 };
	const tensors = toLayout(weights, layout, path);
	return {
		tensors,
		write: (folder, onBytes, library) => {
			const entries = [...tensors.tensors].map(
				([name, { dtype, shape }]): ShardEntry => ({
					name,
					dtype,
					shape,
					offsets: shape.map(() => 0),
					sizes: shape,
					data: () => readPieces(tensors, name),
				}),
			);
			const { sync } = options;
			const report = writeShard(folder, 0, entries, {
				fileBytes: options.shardBytes || defaultFileBytes,
				onBytes,
				library,
				sync,
			});
			const description = {
				iteration: source.iteration,
				generator: options.generator,
				model: source.model,
				common: source.common,
				source: source.spelling,
				layout: options.layout,
				objects: Object.fromEntries(source.objects),
			};
			return { indexSha256: writeIndex(folder, [report], description, { sync }) };
		},
	};
}
