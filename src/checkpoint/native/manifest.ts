/**
 * index.json of a native checkpoint (docs/spec/checkpoint.md §8.3): the tensors, the place of every chunk, and its
 * checksum. It is the commit record: it is written last, so a folder without it is not a checkpoint.
 */
import { UserError } from "../../system/errors.ts";
import { type Box, partitionFault } from "../chunks.ts";
import { type DtypeTag, elementCount, isDtypeTag, tensorBytes } from "../dtype.ts";
import type { TensorType } from "../store.ts";

export const formatName = "mimo-native";
export const formatVersion = 1;
export const indexName = "index.json";
export const latestName = "latest.json";

/** Plain data, as in JSON. */
export type Json = null | boolean | number | string | readonly Json[] | { readonly [key: string]: Json };

/** A box of a tensor: a tensor of its own in a safetensors file. */
export interface NativeChunk extends Box {
	readonly file: string;
	/** Name of the chunk in the file. */
	readonly name: string;
	/** SHA-256 of the chunk's bytes. */
	readonly sha256: string;
}

export interface NativeTensor extends TensorType {
	readonly chunks: readonly NativeChunk[];
}

export interface NativeFile {
	readonly bytes: number;
	/** SHA-256 of the safetensors header with its length in front: together with the chunks it covers the whole file. */
	readonly headerSha256: string;
}

/** An opaque object: a byte tensor of objects.safetensors. */
export interface NativeObject {
	readonly bytes: number;
	readonly sha256: string;
	readonly encoding: "torch-save" | "json" | "raw";
}

/** Deviations of names and layouts from the canonical ones, made only by a conversion on request. */
export interface NativeLayout {
	/** `logical`: the layers of a bracket group share an index. */
	readonly layerNames: "physical" | "logical";
	/** `grouped`: the experts of a layer in one tensor. */
	readonly experts: "indexed" | "grouped";
	/** Rows of gated fc1: gate then linear half, or blocks of both in turn, of this many rows (0: halves). */
	readonly glu: { readonly experts: number; readonly sharedExperts: number };
	/** The layers with their groups in brackets; null where layerNames is physical. */
	readonly pattern: string | null;
}

export const canonicalLayout: NativeLayout = {
	layerNames: "physical",
	experts: "indexed",
	glu: { experts: 0, sharedExperts: 0 },
	pattern: null,
};

export interface Manifest {
	readonly format: typeof formatName;
	readonly version: number;
	/** null: weights without a training step (converted from elsewhere). */
	readonly iteration: number | null;
	/** RFC 3339. */
	readonly created: string;
	readonly generator: string;
	/** The configuration of the run or model, keys in camelCase; empty if unknown. */
	readonly model: { readonly [key: string]: Json };
	readonly layout: NativeLayout;
	/** Settings with which the source's own spelling can be written again. */
	readonly source: { readonly [key: string]: Json };
	readonly files: { readonly [path: string]: NativeFile };
	readonly tensors: { readonly [name: string]: NativeTensor };
	readonly objects: { readonly [name: string]: NativeObject };
	/** Optimizer groups, schedule, random state, data state, counters. */
	readonly common: { readonly [key: string]: Json };
}

/** Deterministic: keys sorted, tensors one a line so that a diff reads. */
export function formatManifest(manifest: Manifest): string {
	const lines = Object.entries(manifest)
		.sort(([a], [b]) => (a < b ? -1 : 1))
		.map(([key, value]) => {
			const text =
				key === "tensors" || key === "files" || key === "objects"
					? `{\n${Object.entries(value as object)
							.sort(([a], [b]) => (a < b ? -1 : 1))
							.map(([name, entry]) => `    ${JSON.stringify(name)}: ${sortedJson(entry)}`)
							.join(",\n")}\n  }`
					: sortedJson(value);
			return `  ${JSON.stringify(key)}: ${text}`;
		});
	return `{\n${lines.join(",\n")}\n}\n`;
}

/** JSON with the keys of every object sorted. */
export function sortedJson(value: unknown): string {
	if (Array.isArray(value)) return `[${value.map(sortedJson).join(",")}]`;
	if (typeof value !== "object" || value === null) {
		if (typeof value === "number" && !Number.isFinite(value)) throw new RangeError(`${value} is not JSON.`);
		return JSON.stringify(value) ?? "null";
	}
	const entries = Object.entries(value).filter(([, entry]) => entry !== undefined);
	const text = entries
		.sort(([a], [b]) => (a < b ? -1 : 1))
		.map(([key, entry]) => `${JSON.stringify(key)}:${sortedJson(entry)}`);
	return `{${text.join(",")}}`;
}

const sha256 = /^[0-9a-f]{64}$/;
/** Plain names below the checkpoint's folder: one level at most, nothing that leads out. */
const filePath = /^(data\/)?[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$/;

type Refuse = (sentence: string) => never;
type Fields = Readonly<Record<string, unknown>>;

function isObject(value: unknown): value is Fields {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Reads and checks a manifest; `path` is for errors. */
export function parseManifest(text: string, path: string): Manifest {
	const bad: Refuse = (sentence) => {
		throw new UserError(`${path} is not a valid checkpoint index: ${sentence}.`);
	};
	let root: unknown;
	try {
		root = JSON.parse(text);
	} catch (error) {
		return bad(`it is not JSON (${(error as Error).message})`);
	}
	if (!isObject(root) || root.format !== formatName) return bad(`its format is not ${formatName}`);
	if (root.version !== formatVersion) return bad(`its version ${JSON.stringify(root.version)} is unknown`);
	if (root.iteration !== null && !isSize(root.iteration)) return bad("its iteration is invalid");
	for (const key of ["model", "layout", "source", "files", "tensors", "objects", "common"]) {
		if (!isObject(root[key])) return bad(`it has no ${key}`);
	}
	if (!isLayout(root.layout)) return bad("its layout is unknown");
	for (const [name, file] of Object.entries(root.files as Fields)) {
		if (!filePath.test(name)) return bad(`the file name ${JSON.stringify(name)} is not allowed`);
		if (!isObject(file) || !isSize(file.bytes) || !isHash(file.headerSha256)) {
			return bad(`file ${name} has no size or checksum`);
		}
	}
	const used = new Set<string>();
	for (const [name, tensor] of Object.entries(root.tensors as Fields)) {
		checkTensor(name, tensor, root.files as Fields, used, bad);
	}
	for (const [name, object] of Object.entries(root.objects as Fields)) {
		if (!isObject(object) || !isSize(object.bytes) || !isHash(object.sha256)) {
			return bad(`object ${name} has no size or checksum`);
		}
	}
	return root as unknown as Manifest;
}

function isLayout(value: unknown): value is NativeLayout {
	const { layerNames, experts, glu, pattern } = value as Fields;
	return (
		(layerNames === "physical" || (layerNames === "logical" && typeof pattern === "string")) &&
		(experts === "indexed" || experts === "grouped") &&
		isObject(glu) &&
		isSize(glu.experts) &&
		isSize(glu.sharedExperts)
	);
}

function isSize(value: unknown): value is number {
	return Number.isSafeInteger(value) && (value as number) >= 0;
}

function isHash(value: unknown): value is string {
	return typeof value === "string" && sha256.test(value);
}

function isShape(value: unknown): value is readonly number[] {
	return Array.isArray(value) && value.length <= 32 && value.every(isSize);
}

function checkTensor(name: string, tensor: unknown, files: Fields, used: Set<string>, bad: Refuse): void {
	if (!isObject(tensor) || !isDtypeTag(tensor.dtype) || !isShape(tensor.shape) || !Array.isArray(tensor.chunks)) {
		bad(`tensor ${name} has no dtype, shape or chunks`);
	}
	if (tensorBytes(tensor.dtype as DtypeTag, tensor.shape) === null || elementCount(tensor.shape) === null) {
		bad(`tensor ${name} of shape [${tensor.shape}] has an invalid size`);
	}
	for (const chunk of tensor.chunks) {
		if (!isObject(chunk) || !isShape(chunk.offsets) || !isShape(chunk.sizes) || !isHash(chunk.sha256)) {
			bad(`tensor ${name} has an invalid chunk`);
		}
		const { file, name: inside } = chunk;
		if (typeof file !== "string" || typeof inside !== "string" || !Object.hasOwn(files, file)) {
			bad(`a chunk of tensor ${name} is in no listed file`);
		}
		const key = `${file}\0${inside}`;
		if (used.has(key)) bad(`${inside} in ${file} belongs to two tensors`);
		used.add(key);
	}
	const fault = partitionFault(tensor.shape, tensor.chunks as Box[]);
	if (fault) bad(`tensor ${name} ${fault}`);
}
