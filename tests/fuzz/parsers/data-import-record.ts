import { parseJsonBytes } from "../../../src/data/energon/format/python-text.ts";
import type { ImageFile } from "../../../src/data/import/fetch-image.ts";
import { sampleParts } from "../../../src/data/import/import.ts";
import { readRecord } from "../../../src/data/import/read-record.ts";
import { noColumns, SkippedRow } from "../../../src/data/import/row.ts";
import type { FuzzParser } from "../parser.ts";

const image = "data:image/png;base64,iVBORw0KGgo=";
const records = [
	{
		id: 1,
		image: ["a.png", "b.png"],
		conversations: [
			{ from: "human", value: "<image>?" },
			{ from: "gpt", value: "!" },
		],
	},
	{
		messages: [
			{
				role: "user",
				content: [
					{ type: "image_url", image_url: { url: image } },
					{ type: "text", text: "?" },
				],
			},
			{ role: "assistant", content: "!" },
		],
	},
	{ texts: ["a", null], images: [null, "http://host/a.jpg"] },
	{ text_list: ["a", "b"], image_info: [{ image_name: "a.jpg", matched_text_index: 1 }] },
	{ question: "?", answers: ["a", 2], img: { bytes: null, path: "a.png" }, system: "s" },
	{ texts: [{ user: "?", assistant: "!" }], images: [] },
];
const found: ImageFile = {
	...{ file: new Uint8Array(4), extension: "png", name: null },
	...{ width: 4, height: 4, orientation: 1, grey16: false },
};

export default {
	about: "records of imported data, as samples",
	open: () => ({
		seeds: records.map((record) => Buffer.from(JSON.stringify(record))),
		json: true,
		dictionary: ["<image>", "file://", "null", "[[[", "\\u0000", "matched_text_index", "content"],
		parse: (bytes) => {
			let value: unknown;
			try {
				value = parseJsonBytes(bytes);
			} catch (error) {
				throw new SkippedRow((error as Error).message);
			}
			if (typeof value !== "object" || value === null || Array.isArray(value)) throw new SkippedRow("no object");
			const { record, images } = readRecord(value as Record<string, unknown>, [], "folder", noColumns);
			sampleParts(
				"000000000",
				record,
				images.map(() => found),
			);
		},
		refuses: (error) => error instanceof SkippedRow && error.message.length <= 10_000,
	}),
} satisfies FuzzParser;
