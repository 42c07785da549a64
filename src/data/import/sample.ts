/** Converts a record into a crude sample with a JSON part and image parts, which the reader of training checks. */
import { SampleError } from "../energon/errors.ts";
import { LARGEST_SAMPLE } from "../energon/format/tar-reader.ts";
import { conversationOf } from "../vision-language/conversation.ts";
import { faultOf } from "../vision-language/conversation-faults.ts";
import type { ImageFile } from "./fetch-image.ts";
import type { SampleRecord } from "./read-record.ts";
import { SkippedRow } from "./row.ts";
import type { SamplePart } from "./shard-file.ts";

const noPrompts = { caption: "", ocr: "", classification: "" };

/**
 * Parts of the sample of a record. The name of an image part is the image's format, after a number if there are several images.
 * Throws a SkippedRow for a sample that training would skip or that has no text to learn.
 */
export function sampleParts(key: string, record: SampleRecord, images: readonly ImageFile[]): readonly SamplePart[] {
	const names = images.map(({ extension }, i) => (images.length === 1 ? extension : `${i}.${extension}`));
	const named =
		"texts" in record ? { ...record, images: record.images.map((i) => (i === null ? null : names[i]!)) } : record;
	const fields: Record<string, unknown> = { json: named };
	for (const [i, image] of images.entries()) fields[names[i]!] = image;
	const fault = trainingFault(key, fields);
	if (fault !== null) throw new SkippedRow(fault);
	const parts = [
		...images.map(({ file }, i): SamplePart => [names[i]!, file]),
		["json", Buffer.from(JSON.stringify(named))] as const,
	];
	const bytes = parts.reduce((sum, [, content]) => sum + content.length + 1024, 0);
	if (bytes > LARGEST_SAMPLE) throw new SkippedRow(`it has ${bytes} bytes; a sample has at most ${LARGEST_SAMPLE}`);
	return parts;
}

function trainingFault(key: string, fields: Readonly<Record<string, unknown>>): string | null {
	try {
		const sample = { key, restoreKey: [], sources: [], subflavors: {}, type: "CrudeSample", fields };
		return faultOf(conversationOf(sample, noPrompts));
	} catch (error) {
		if (!(error instanceof SampleError)) throw error;
		return error.message.replace(/^Sample \S+ cannot be trained on: /, "").replace(/\.$/, "");
	}
}
