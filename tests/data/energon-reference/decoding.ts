/** Checks `decode.json`: decoded images, texts and crude samples. */
import { CryptoHasher } from "bun";
import { defaultLoadOptions, loadDatasets } from "../../../src/data/energon/dataset.ts";
import { raiseError } from "../../../src/data/energon/errors.ts";
import type { DecodeOptions } from "../../../src/data/energon/format/media.ts";
import type { RawRecord, Sample } from "../../../src/data/energon/sample.ts";
import { resolvePath } from "../../../src/data/energon/storage/storage.ts";
import { Worker } from "../../../src/data/energon/worker.ts";
import { MapDataset } from "../../../src/data/energon/wrappers/map.ts";
import type { Channels, Image, Images } from "../../../src/native/images.ts";
import { UserError } from "../../../src/system/errors.ts";
import { difference } from "./golden.ts";
import type { Setting } from "./setup.ts";

interface GoldenImage {
	/** "tensor float32", "tensor uint8", "ndarray float32", "ndarray uint8" or "PIL MODE". */
	readonly kind: string;
	readonly shape: readonly number[];
	readonly sha256: string;
	readonly mean: number;
	readonly pixels_at_row_col: readonly (readonly [readonly [number, number], number | readonly number[]])[];
}

interface GoldenBytes {
	readonly kind: "bytes";
	readonly size: number;
	readonly sha256: string;
}

export interface DecodeFile {
	readonly cases: readonly (
		| { readonly dataset: string; readonly image_decode: null; readonly not_delivered: readonly string[] }
		| {
				readonly dataset: string;
				/** Name of the image decoder; null = nothing is decoded. */
				readonly image_decode: string | null;
				readonly key: string;
				readonly image: GoldenImage | GoldenBytes;
				readonly caption?: GoldenBytes | { readonly kind: "str"; readonly value: string };
		  }
	)[];
	readonly crude: readonly { readonly dataset: string; readonly crude_sample: Readonly<Record<string, unknown>> }[];
}

export function checkDecoding(setting: Setting, images: Images, file: DecodeFile): string | null {
	const readers = new Map<string, Map<string, Sample>>();
	const samplesOf = (dataset: string, decode: DecodeOptions): Map<string, Sample> => {
		const name = `${dataset} ${decode === null}`;
		let samples = readers.get(name);
		if (samples === undefined) {
			samples = readAll(setting, dataset, decode);
			readers.set(name, samples);
		}
		return samples;
	};
	for (const [i, entry] of file.cases.entries()) {
		const samples = samplesOf(entry.dataset, entry.image_decode === null ? null : { images: null });
		if ("not_delivered" in entry) {
			const delivered = entry.not_delivered.find((key) => samples.has(key));
			if (delivered !== undefined) return `case ${i}: ${delivered} is delivered without a decoder`;
			continue;
		}
		const sample = samples.get(entry.key);
		if (sample === undefined) return `case ${i}: ${entry.dataset} has no sample ${entry.key}`;
		const found = fieldsDifference(images, sample, entry);
		if (found !== null) return `case ${i} (${entry.key} as ${entry.image_decode}): ${found}`;
	}
	for (const { dataset, crude_sample: expected } of file.crude) {
		const key = expected.__key__ as string;
		const sample = samplesOf(dataset, { images: null }).get(key);
		if (sample === undefined) return `${dataset} has no sample ${key}`;
		const found = crudeDifference(setting, images, sample, expected);
		if (found !== null) return `crude sample ${key} of ${dataset}: ${found}`;
	}
	return null;
}

function fieldsDifference(
	images: Images,
	{ fields }: Sample,
	{ image_decode: mode, image, caption }: Extract<DecodeFile["cases"][number], { key: string }>,
): string | null {
	const pixels =
		image.kind === "bytes"
			? bytesDifference(fields.image, image as GoldenBytes, "image")
			: imageDifference(images, fields.image as Uint8Array, mode!, image as GoldenImage);
	if (pixels !== null || caption === undefined) return pixels;
	if (caption.kind === "bytes") return bytesDifference(fields.caption, caption, "caption");
	return difference(fields.caption, caption.value, "caption");
}

function bytesDifference(value: unknown, { size, sha256 }: GoldenBytes, what: string): string | null {
	if (!(value instanceof Uint8Array)) return `${what} was decoded`;
	return difference(
		{ size: value.length, sha256: new CryptoHasher("sha256").update(value).digest("hex") },
		{ size, sha256 },
		what,
	);
}

/** Samples of every split part of a dataset by key, images encoded. Those that fail to load are left out. */
function readAll(setting: Setting, dataset: string, decode: DecodeOptions): Map<string, Sample> {
	const samples = new Map<string, Sample>();
	for (const splitPart of ["train", "val", "test"]) {
		const path = resolvePath(setting.golden, dataset);
		let loaded: ReturnType<typeof loadDatasets>;
		try {
			const options = { ...defaultLoadOptions, splitPart, shuffleOverEpochsMultiplier: null, parallelShardIters: 1 };
			loaded = loadDatasets(setting.storage, path, decode, options);
		} catch (error) {
			if (error instanceof UserError && splitPart !== "train") continue;
			throw error;
		}
		const config = { rank: 0, worldSize: 1, numWorkers: 0, seedOffset: 0 };
		const worker = new Worker({ ...config, errorHandler: () => {}, restoreErrorHandler: raiseError }, 0);
		const { records, load } = loaded.datasets[0]!.build(worker, 0);
		for (const sample of new MapDataset<RawRecord, Sample>(records, load).iterate()) {
			if (!samples.has(sample.key)) samples.set(sample.key, sample);
		}
	}
	return samples;
}

/** Decoder names end with the channels: l, rgb (the default) or rgba, and perhaps 8. */
function channelsOf(mode: string): Channels {
	const channels = /(rgba|rgb|l)?8?$/.exec(mode.replace(/^(torch|pil)/, ""))![1];
	return channels === "rgba" ? 4 : channels === "l" ? 1 : 3;
}

function imageDifference(images: Images, bytes: Uint8Array, mode: string, golden: GoldenImage): string | null {
	const image = images.decode(bytes, channelsOf(mode));
	const { shape, values, at } = arrange(image, golden.kind);
	const wrongShape = difference(shape, golden.shape, "shape");
	if (wrongShape !== null) return wrongShape;
	const sha256 = new CryptoHasher("sha256").update(new Uint8Array(values.buffer)).digest("hex");
	if (sha256 === golden.sha256) return null;
	for (const [[row, column], expected] of golden.pixels_at_row_col) {
		const pixel = at(row, column);
		const wrong = [expected].flat().some((value, c) => pixel[c] !== value);
		if (wrong) return `pixel at row ${row}, column ${column} is ${pixel} instead of ${expected}`;
	}
	return `the pixels' hash is ${sha256} instead of ${golden.sha256}`;
}

interface Arranged {
	readonly shape: readonly number[];
	readonly values: Uint8Array | Float32Array;
	readonly at: (row: number, column: number) => number[];
}

/** Pixels as the decoder of that kind returns them: tensors channel first, floats from 0 to 1, grey without channels. */
function arrange({ width, height, channels, pixels }: Image, kind: string): Arranged {
	const planar = kind.startsWith("tensor") && channels > 1;
	const area = width * height;
	const order = (i: number) => (planar ? (i % area) * channels + Math.floor(i / area) : i);
	const values = kind.endsWith("float32")
		? Float32Array.from(pixels, (_, i) => pixels[order(i)]! / 255)
		: Uint8Array.from(pixels, (_, i) => pixels[order(i)]!);
	const plain = channels === 1 ? [height, width] : [height, width, channels];
	const unit = values instanceof Float32Array ? 255 : 1;
	return {
		shape: planar ? [channels, height, width] : plain,
		values,
		at: (row, column) =>
			Array.from({ length: channels }, (_, c) => Math.fround(pixels[(row * width + column) * channels + c]! / unit)),
	};
}

function crudeDifference(
	setting: Setting,
	images: Images,
	sample: Sample,
	expected: Readonly<Record<string, unknown>>,
): string | null {
	for (const [name, value] of Object.entries(expected)) {
		if (name === "__restore_key__") continue;
		let found: string | null;
		if (name === "__key__") found = difference(sample.key, value, name);
		else if (name === "__shard__") found = difference(sample.sources[0]!.shardName, value, name);
		else if (name === "__subflavors__") found = difference(sample.subflavors, value ?? {}, name);
		else if (name === "__sources__") found = difference(sourcesOf(setting, sample), value, name);
		else if (typeof value === "object" && value !== null && "sha256" in value) {
			const bytes = sample.fields[name] as Uint8Array;
			found = imageDifference(images, bytes, "pilrgb", value as unknown as GoldenImage);
		} else found = difference(sample.fields[name], value, name);
		if (found !== null) return `${name}: ${found}`;
	}
	return null;
}

function sourcesOf({ golden }: Setting, sample: Sample): unknown {
	return sample.sources.map(({ datasetPath, index, shardName, fileNames }) => ({
		__type__: "SourceInfo",
		dataset_path: datasetPath.replace(`${golden}/`, ""),
		index,
		shard_name: shardName,
		file_names: fileNames,
	}));
}
