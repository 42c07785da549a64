/** Native checkpoints as source and target of conversions. */
import type { Library } from "../../native/library.ts";
import type { Durability } from "../files.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import type { NativeLayout } from "../native/manifest.ts";
import { NativeCheckpoint } from "../native/reader.ts";
import { defaultFileBytes, type ShardEntry, writeIndex, writeShard } from "../native/writer.ts";
import { readPieces, selectTensors, type TensorStore } from "../store.ts";
import { isJsonObject } from "../torch-dist/common.ts";
import { fromLayout, type StoredLayout, toLayout } from "./layouts.ts";
import type { SourceCheckpoint, SourceOptions, StoredObject } from "./source.ts";

export function openNativeSource(path: string, options: SourceOptions): SourceCheckpoint {
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

export interface NativeTarget {
	readonly tensors: TensorStore;
	/** Fills a new folder; `library` hashes the written bytes. */
	readonly write: (
		folder: string,
		onBytes: (bytes: number) => void,
		library: Library,
	) => { readonly indexSha256: string };
}

/** Plans an iteration's folder for a source's tensors. */
export function nativeTarget(
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
