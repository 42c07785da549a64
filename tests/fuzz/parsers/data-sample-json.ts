import { SampleError } from "../../../src/data/energon/errors.ts";
import { decodeParts } from "../../../src/data/energon/format/media.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import { conversationOf } from "../../../src/data/vision-language/conversation.ts";
import { encodePieces } from "../../../src/data/vision-language/encoding.ts";
import { decodedAs } from "../../../src/data/vision-language/pixels.ts";
import { render } from "../../../src/data/vision-language/prompt.ts";
import { smallTask } from "../../data/vision-language/task.ts";
import type { FuzzParser } from "../parser.ts";
import { inputName } from "../parser.ts";

const texts = [
	{
		conversations: [
			{ from: "human", value: "<image>What?" },
			{ from: "gpt", value: "That." },
		],
	},
	{
		messages: [
			{ role: "user", content: [{ type: "image" }, { type: "text", text: "And?" }] },
			{ role: "assistant", content: "So." },
		],
	},
	{ caption: "A cat.", image: "a.png", score: 0.5, number: 9007199254740991 },
];
const image = { file: new Uint8Array(4), width: 64, height: 32, orientation: 1, grey16: false };
const prompts = { caption: "", ocr: "", classification: "" };

export default {
	about: "JSON parts of crude samples, as conversations and tokens",
	open: () => ({
		seeds: texts.map((json) => Buffer.from(JSON.stringify(json))),
		json: true,
		dictionary: [
			"NaN",
			"-Infinity",
			"\ufeff",
			"<image>",
			"<video>",
			"[".repeat(300),
			"1e999",
			"99999999999999999999",
			"\\ud800",
		],
		parse: (bytes) => {
			const parts = new Map([["json", bytes]]);
			const { json } = decodeParts({ key: inputName, shard: inputName, sources: [], parts }, { images: null });
			const fields = { json, "a.png": image };
			const sample = { key: inputName, restoreKey: [], sources: [], subflavors: {}, type: "CrudeSample", fields };
			const conversation = conversationOf(sample, prompts);
			const pieces = render(inputName, conversation, { template: "chatml", lossRoles: null, imageTags: ["", ""] });
			const images = conversation.images.map((image) => decodedAs(image, "transformers"));
			encodePieces(inputName, pieces, images, byteTokenizer, smallTask);
		},
		refuses: (error) =>
			error instanceof SampleError && error.message.includes(inputName) && error.message.length <= 10_000,
	}),
} satisfies FuzzParser;
