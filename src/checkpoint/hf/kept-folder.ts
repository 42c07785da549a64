/**
 * The parts kept of the Hugging Face folders that a model came from, so that a folder written later has their config.json,
 * names, tokenizer and preprocessor, and the tensors that the model has no place for. A native checkpoint carries it as
 * objects and in its `source`.
 */
import { UserError } from "../../system/errors.ts";
import type { ByteSource } from "../../system/input-file.ts";
import { encodeFloats } from "../dtype.ts";
import type { NativeObject } from "../native/manifest.ts";
import { parseSafetensors, type SafetensorsFile, streamSafetensors } from "../safetensors.ts";
import { joinStores, readPieces, selectTensors, type TensorStore, type TensorType } from "../store.ts";
import { type Companions, companionsOf } from "./companions.ts";
import type { Spelling } from "./families/family.ts";
import type { FolderParts } from "./parts.ts";
import type { ProjectorStyle } from "./projector-names.ts";
import { isKept } from "./unused-tensors.ts";
import { behindTap } from "./vision-configuration.ts";
import type { TowerSpelling } from "./vision-names.ts";

/** Object of a native checkpoint that keeps config.json. */
export const configObject = "huggingface/config.json";
const leftOutObject = "huggingface/left-out.safetensors";
const filePrefix = "huggingface/files/";

/** A folder's tensor spelling of each part; null: it lacks the part. */
export interface FolderSpelling {
	readonly language: Spelling | null;
	readonly tower: TowerSpelling | null;
	readonly projector: ProjectorStyle | null;
}

export interface KeptFolder {
	readonly configText: string;
	readonly spelling: FolderSpelling;
	/** Tensors without a place in the model, under the folder's names. */
	readonly leftOut: TensorStore;
	readonly companions: Companions;
}

export interface KeptObject {
	readonly encoding: NativeObject["encoding"];
	readonly bytes: Uint8Array;
}

/** Keeps what is needed of an open folder, which it goes on reading from. `beside`: false leaves out modules of gigabytes. */
export function keepFolder(parts: FolderParts, { beside }: { readonly beside: boolean }): KeptFolder {
	const { stored, scales, language, tower, projector } = parts;
	const leftOut = new Set(parts.leftOut);
	const behind = behindTap(parts.json, tower?.spelling ?? null, parts.configPath);
	return {
		configText: parts.configText ?? "{}",
		spelling: {
			language: language?.spelling ?? null,
			tower: tower?.spelling ?? null,
			projector: projector?.style ?? null,
		},
		leftOut: joinStores(stored.path, [
			selectTensors(stored, (name) => (leftOut.has(name) && isKept(name, { beside })) || behind(name)),
			ones(stored, scales),
		]),
		companions: companionsOf(parts.path),
	};
}

/** Layer scales after they were multiplied in: all one. */
export function ones(
	stored: Pick<TensorStore, "path" | "tensors">,
	scales: readonly string[],
	rename: (name: string) => string = (name) => name,
): TensorStore {
	const types = new Map(scales.map((name): [string, TensorType] => [rename(name), stored.tensors.get(name)!]));
	return {
		path: stored.path,
		tensors: types,
		readInto: (name, offset, into) => {
			const { dtype, shape } = types.get(name)!;
			const bytes = encodeFloats(dtype, new Float32Array(shape[0]!).fill(1));
			into.set(bytes.subarray(offset, offset + into.byteLength));
		},
		[Symbol.dispose]: () => {},
	};
}

/** The objects of a native checkpoint that hold it. */
export function objectsOf({ configText, leftOut, companions }: KeptFolder): ReadonlyMap<string, KeptObject> {
	const objects = new Map<string, KeptObject>([
		[configObject, { encoding: "json", bytes: new TextEncoder().encode(configText) }],
	]);
	if (leftOut.tensors.size > 0) objects.set(leftOutObject, { encoding: "raw", bytes: packed(leftOut) });
	for (const [name, bytes] of companions) objects.set(filePrefix + name, { encoding: "raw", bytes });
	return objects;
}

/** The names of `objectsOf`. */
export function isKeptObject(name: string): boolean {
	return name.startsWith("huggingface/");
}

/** From a native checkpoint's objects; null where it came from no folder. */
export function keptIn(
	objects: ReadonlyMap<string, KeptObject>,
	spelling: FolderSpelling,
	path: string,
): KeptFolder | null {
	const config = objects.get(configObject);
	if (config === undefined) return null;
	const leftOut = objects.get(leftOutObject);
	return {
		configText: new TextDecoder().decode(config.bytes),
		spelling,
		leftOut: leftOut === undefined ? joinStores(path, []) : unpacked(leftOut.bytes, `${path} (${leftOutObject})`),
		companions: new Map(
			[...objects]
				.filter(([name]) => name.startsWith(filePrefix))
				.map(([name, { bytes }]) => [requireName(name.slice(filePrefix.length), path), bytes]),
		),
	};
}

/** An object becomes a file of its name. */
function requireName(name: string, path: string): string {
	if (/^[A-Za-z0-9_][A-Za-z0-9_.-]*$/.test(name) && !/^(config|model\b.*|mimo)\.(json|safetensors)$/.test(name))
		return name;
	throw new UserError(`${path} keeps a file of the name ${JSON.stringify(name)}, which is none of a tokenizer's.`);
}

function packed(store: TensorStore): Uint8Array {
	const parts: Uint8Array[] = [];
	const sink = { path: store.path, expect: () => {}, write: (part: Uint8Array) => void parts.push(part.slice()) };
	const entries = [...store.tensors].map(([name, type]) => ({ name, ...type, data: () => readPieces(store, name) }));
	streamSafetensors(sink as unknown as Parameters<typeof streamSafetensors>[0], entries, { format: "pt" });
	return new Uint8Array(Buffer.concat(parts));
}

function unpacked(bytes: Uint8Array, path: string): SafetensorsFile {
	const range = (position: number, length: number) => {
		if (position >= 0 && length >= 0 && position + length <= bytes.length) {
			return bytes.slice(position, position + length);
		}
		throw new UserError(`${path} is truncated.`);
	};
	const source: ByteSource = {
		path,
		size: bytes.length,
		read: range,
		readInto: (position, into) => into.set(range(position, into.byteLength)),
	};
	return parseSafetensors(source);
}
