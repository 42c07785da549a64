/**
 * A checkpoint of any format behind one face: tensors under canonical logical names (Megatron's, experts one by one,
 * layers by physical index), and everything else it holds as plain data.
 */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import type { Manifest, NativeObject } from "../native/manifest.ts";
import { isCheckpoint } from "../native/reader.ts";
import { requireFolder } from "../remote/store-address.ts";
import type { TensorStore } from "../store.ts";

export const formats = ["hf", "native", "torch_dist"] as const;
export type FormatName = (typeof formats)[number];

export type JsonObject = Manifest["common"];

export interface StoredObject {
	readonly encoding: NativeObject["encoding"];
	readonly bytes: Uint8Array;
}

export interface SourceCheckpoint extends Disposable {
	readonly format: FormatName;
	/** The folder that holds the tensors. */
	readonly path: string;
	/** Sentences about the source, by which nothing is lost. */
	readonly notices: readonly string[];
	/** Sentences about what is lost, or is not what was asked for. */
	readonly warnings: readonly string[];
	/** Model tensors by name, optimizer's by `optimizer.state.<state>.<name>`. */
	readonly weights: TensorStore;
	/** Tensors as they are stored. */
	readonly stored: TensorStore;
	/** null: the checkpoint does not say what model it is. */
	readonly configuration: LanguageModelConfiguration | null;
	/** The run's or model's whole configuration, as a native manifest keeps it. */
	readonly model: JsonObject;
	readonly iteration: number | null;
	readonly common: JsonObject;
	/** Spellings of the formats it came through, for writing them again. */
	readonly spelling: JsonObject;
	readonly objects: ReadonlyMap<string, StoredObject>;
	/** Makes the values that the source does not hold; to be awaited before values are read. */
	readonly prepare?: () => Promise<void>;
}

export interface NewLayerOptions {
	/** Seed of the new layers' initial values. */
	readonly seed: number;
	/** Megatron's arguments of their sizes, mamba_num_heads and so on. */
	readonly sizes: JsonObject;
}

/** Options of reading a source. */
export interface SourceOptions {
	/** Read optimizer state too. */
	readonly optimizer: boolean;
	readonly allowFallback: boolean;
	/** Heads of the vision tower, where its width does not tell. */
	readonly visionHeads: number | null;
	/** Options of the Mamba-2 layers that are added when a GPT model becomes a hybrid one. */
	readonly newLayers: NewLayerOptions;
	/** Layer pattern, where the checkpoint does not say it (or says it without its groups). */
	readonly pattern: string | null;
	/** Classes that a pickle may name beside the fixed list. */
	readonly inert: readonly string[];
}

/** The format that a path looks like, or null. */
export function detectFormat(path: string): FormatName | null {
	if (!existsSync(path) || !statSync(path).isDirectory()) return null;
	const has = (name: string) => existsSync(join(path, name));
	if (isCheckpoint(path)) return "native";
	if (has("latest_checkpointed_iteration.txt") || has(".metadata") || has("metadata.json")) return "torch_dist";
	return has("config.json") ? "hf" : null;
}

/** The format of a path, which must be what `expected` says if it is given. */
export function requireFormat(path: string, expected: FormatName | null): FormatName {
	requireFolder(path);
	if (!existsSync(path)) throw new UserError(`Cannot open ${path}: it does not exist.`);
	const found = detectFormat(path);
	if (expected !== null) {
		if (found !== null && found !== expected) {
			throw new UserError(`${path} is a ${found} checkpoint, not a ${expected} one.`);
		}
		return expected;
	}
	if (found === null) throw new UserError(`${path} is not a checkpoint of a known format (${formats.join(", ")}).`);
	return found;
}
