/** Refusal of settings and media of data sets that training would ignore. */
import { UserError } from "../../system/errors.ts";
import type { LoadedDataset } from "../energon/task-encoder.ts";
import { taskOfDataset } from "./data-settings.ts";
import { mediaOfRecord } from "./media.ts";
import { chatOf, type VisionLanguageTask } from "./task.ts";

/** Records of a JSONL file that are looked at when it is opened. */
const LOOKED_AT = 100;

/**
 * Throws a UserError for JSONL records that name images which no auxiliary data have, video or audio, for settings of a data
 * set that cannot be, and for chat templates that take too much.
 */
export function checkTrainable(datasets: readonly LoadedDataset[], task: VisionLanguageTask): void {
	const tried = new Set<string>();
	for (const { path, aux, records, subflavors } of datasets) {
		const own = taskOfDataset(task, subflavors, path);
		const { template } = own.chat;
		if (own.template === "jinja" && template !== null && !tried.has(template.text)) {
			tried.add(template.text);
			chatOf(own, { specialTokens: [], addedText: () => null });
		}
		if (records === null) continue;
		const count = Math.min(LOOKED_AT, records.length);
		for (let i = 0; i < count; i++) {
			const index = Math.floor((i * records.length) / count);
			const media = mediaOfRecord(records.read(index), path, aux.length > 0);
			if (media !== null) throw new UserError(`${path}, record ${index}: ${media}.`);
		}
	}
}
