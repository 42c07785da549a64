/**
 * Keys that say how text and images are read, of the checkpoint that a training goes on from. Their defaults come from folders and
 * may be others by now; the training keeps those that it began with.
 */
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

/** Returns none where `load` names no checkpoint of this program, where only its weights are loaded, and where it is damaged. */
export const readStoredDataKeys: FolderReader = (given) => {
	const [load, step] = [given("load"), given("ckpt-step")];
	if (typeof load !== "string" || given("finetune") === true || !isCheckpoint(load)) return [];
	try {
		using checkpoint = NativeCheckpoint.openExactly(typeof step === "number" ? join(load, iterationName(step)) : load);
		const stored = describedModel(checkpoint.manifest);
		const own = given("chat-template") === undefined ? [...text, ...images] : images;
		return own.flatMap((key) => {
			const value = stored[propertyOf(key)];
			return value === undefined ? [] : [{ key, value, from: checkpoint.path, fixed: false }];
		});
	} catch (error) {
		// The ranks name the damage, or fall back to an older checkpoint.
		if (error instanceof UserError) return [];
		throw error;
	}
};
