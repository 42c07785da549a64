/** The configuration in the checkpoint that a training goes on from. */
import { join } from "node:path";
import { type Key, propertyOf } from "../../config/schema.ts";
import type { FolderReader } from "../../config/sources.ts";
import { UserError } from "../../system/errors.ts";
import { isCheckpoint, NativeCheckpoint } from "../native/reader.ts";
import { iterationName } from "../native/writer.ts";
import { describedModel } from "./megatron-record.ts";

const text: readonly Key[] = ["conversation-template", "image-tag-type"];
const images: readonly Key[] = [
	...(["dynamic-resolution", "dynamic-resolution-min-patches", "dynamic-resolution-max-patches"] as const),
	...(["use-tiling", "max-num-tiles", "use-thumbnail", "img-h", "img-w", "image-mean", "image-std"] as const),
];

/** A configuration by property, and the checkpoint that holds it. */
export interface StoredConfiguration {
	readonly path: string;
	readonly values: ReturnType<typeof describedModel>;
}

/**
 * The configuration in the checkpoint that a training goes on from. Null where `load` names no checkpoint of this program, where only
 * its weights are loaded, and where it is damaged: the ranks name the damage, or take an older one.
 */
export function storedConfiguration(given: (key: Key) => unknown): StoredConfiguration | null {
	const [load, step] = [given("load"), given("ckpt-step")];
	if (typeof load !== "string" || given("finetune") === true || !isCheckpoint(load)) return null;
	try {
		using checkpoint = NativeCheckpoint.openExactly(typeof step === "number" ? join(load, iterationName(step)) : load);
		return { path: checkpoint.path, values: describedModel(checkpoint.manifest) };
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}

/**
 * Keys that say how text and images are read. Their defaults come from folders and may be others by now; the training keeps those that
 * it began with.
 */
export const readStoredDataKeys: FolderReader = (given) => {
	const stored = storedConfiguration(given);
	if (stored === null) return [];
	const own = (given("chat-template") ?? null) === null ? [...text, ...images] : images;
	return own.flatMap((key) => {
		const value = stored.values[propertyOf(key)];
		return value === undefined ? [] : [{ key, value, from: stored.path, fixed: false }];
	});
};
