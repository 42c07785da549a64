/** Task configurations by name, from which threads build task encoders. */
import { CryptoHasher } from "bun";
import type { Images } from "../../../native/images.ts";
import { byteTokenizer, openTokenizer, readTokenizerFile } from "../../text/tokenizer.ts";
import { buildVisionLanguageTask, type VisionLanguageTask } from "../../vision-language/task.ts";
import type { Remark } from "../errors.ts";
import { hook } from "../hook.ts";
import type { Sample } from "../sample.ts";
import type { Cooker, TaskEncoder } from "../task-encoder.ts";
import { collect } from "../task-encoder.ts";

/** Unchanged samples for tools: undecoded or decoded parts. */
export interface PlainTask {
	readonly kind: "raw" | "decoded";
}

export type TaskConfiguration = PlainTask | VisionLanguageTask;

/** Leaves crude samples unchanged. */
const asItIs: Cooker = { cook: hook("cook", (sample: Sample) => sample), hasSubflavors: {} };

export function buildTask(task: TaskConfiguration, images: Images, remark: Remark): TaskEncoder {
	if (task.kind === "vision-language") {
		const tokenizer = task.tokenizer === null ? byteTokenizer : openTokenizer(task.tokenizer);
		return buildVisionLanguageTask(task, tokenizer, images, remark);
	}
	return {
		decode: task.kind === "raw" ? null : { images: (bytes) => images.decode(bytes) },
		cookers: [asItIs],
		batch: collect,
	};
}

/**
 * The settings of a task that determine the stream: the content of tokenizer and chat template without their paths, and without
 * the half of the data that is delivered.
 */
export function taskIdentity(task: TaskConfiguration): object {
	if (task.kind !== "vision-language") return task;
	const { tokenizer, chat, keep: _, share: __, ...rest } = task;
	const { text, specialTokens } = chat.template ?? {};
	const named = { ...rest, chat: { ...chat, template: { text, specialTokens } } };
	if (tokenizer === null) return named;
	const content = new CryptoHasher("sha256").update(readTokenizerFile(tokenizer).bytes).digest("hex");
	return { ...named, tokenizer: content };
}
