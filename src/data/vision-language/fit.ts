/** Whether a sample keeps all its images and text within the sequence length. */
import type { Sample } from "../energon/sample.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import { conversationOf } from "./conversation.ts";
import { encodePieces } from "./encoding.ts";
import type { VisionLanguageTask } from "./task.ts";
import { render } from "./template.ts";

/** Tokens up to which the whole length of a sample is counted. */
const COUNTED = 2 ** 20;

/** What of a sample is cut off, as a sentence's end; null where all fits. Throws a SampleError as training does. */
export function cutOff(sample: Sample, task: VisionLanguageTask, tokenizer: Tokenizer): string | null {
	const { sequenceLength, imageTokenId } = task;
	const conversation = conversationOf(sample, task.prompts);
	const pieces = render(conversation, task);
	const encode = (length: number) =>
		encodePieces(sample.key, pieces, conversation.images, tokenizer, { ...task, sequenceLength: length });
	const kept = encode(sequenceLength);
	const rows = kept.ids.filter((id) => id === imageTokenId).length;
	const [images, all] = [kept.images.length, conversation.images.length];
	if (images < all) {
		return `${all - images} of its ${all} images do not fit into ${sequenceLength} tokens (--seq-length)`;
	}
	if (kept.ids.length < sequenceLength) return null;
	const text = encode(COUNTED).ids.filter((id) => id !== imageTokenId).length;
	if (text + rows <= sequenceLength) return null;
	return `it has ${text} tokens of text and ${rows} of images, and is cut at ${sequenceLength} (--seq-length)`;
}
