/** Conversations, templates, image places, labels, truncation, packing, batches. */
import { describe, expect, test } from "bun:test";
import type { Sample } from "../../../src/data/energon/sample.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import { buildBatch } from "../../../src/data/vision-language/batch.ts";
import { conversationOf } from "../../../src/data/vision-language/conversation.ts";
import { encodePieces, ignored } from "../../../src/data/vision-language/encoding.ts";
import { planPatches } from "../../../src/data/vision-language/image-plan.ts";
import { decodedAs } from "../../../src/data/vision-language/pixels.ts";
import { render, type TemplateOptions } from "../../../src/data/vision-language/prompt.ts";

const prompts = { caption: "", ocr: "Read it.", classification: "What is it?" };
const image = (side: number) => ({
	...{ file: new Uint8Array([side]), width: side, height: side },
	...{ orientation: 1, grey16: false },
});
const plain: TemplateOptions = { template: "plain", lossRoles: null, imageTags: ["", ""] };

function sample(type: string, fields: Record<string, unknown>): Sample {
	return { key: "s", restoreKey: [], sources: [], subflavors: {}, type, fields };
}

/** The text as it would be tokenised: images as [n], what counts in the loss in capitals' place marked by ·. */
function shown(of: Sample, options: Partial<TemplateOptions> = {}): string {
	return render("s", conversationOf(of, prompts), { ...plain, ...options })
		.map((piece) => {
			if (!("parts" in piece)) return `[${piece.image}]`;
			const text = piece.parts.map((part) => part.text).join("");
			return piece.parts[0]!.loss ? `·${text}·` : text;
		})
		.join("");
}

const conversation = [
	{ from: "human", value: "<image><image> Which?" },
	{ from: "gpt", value: "Both." },
	{ from: "human", value: "Why?" },
	{ from: "gpt", value: "So." },
];
const crude = (json: unknown, images: Record<string, unknown> = {}) => sample("CrudeSample", { json, ...images });

describe("conversations", () => {
	const chatml = { template: "chatml" } as const;

	test("ChatML masks all but the assistant's turns", () => {
		const of = crude({ conversations: conversation }, { "img1.jpg": image(2), "img0.jpg": image(1) });
		expect(shown(of, chatml)).toBe(
			"<|im_start|>user\n[0][1] Which?<|im_end|>\n<|im_start|>assistant\n·Both.<|im_end|>·\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n·So.<|im_end|>·\n",
		);
		expect(conversationOf(of, prompts).images.map(({ width }) => width)).toEqual([1, 2]);
	});

	test("parts sort by number: img2 before img10", () => {
		const of = crude({ text: "<image><image>" }, { "img10.png": image(10), "img2.png": image(2) });
		expect(conversationOf(of, prompts).images.map(({ width }) => width)).toEqual([2, 10]);
	});

	test("images without a tag go before the first turn of the user", () => {
		const messages = [
			{ role: "system", content: "Be short." },
			{ role: "user", content: [{ type: "text", text: "And " }, { type: "image" }] },
			{ role: "assistant", content: "Yes." },
		];
		const of = crude({ messages }, { "a.png": image(1), "b.png": image(2) });
		expect(shown(of, { template: "pretraining" })).toBe("·system: Be short.\nuser: ·[0]·\nAnd ·[1]·\nassistant: Yes.·");
	});

	test("a JSON part may be the list of turns, and an image a part with its URL", () => {
		const images = { "0.jpg": image(1), "1.jpg": image(2) };
		expect(shown(crude(conversation, images), chatml)).toBe(
			shown(crude({ conversations: conversation }, images), chatml),
		);
		const parts = [
			{ type: "image_url", image_url: { url: "1.jpg" } },
			{ type: "text", text: "What?" },
		];
		const messages = [
			{ role: "user", content: parts },
			{ role: "assistant", content: "A dot." },
		];
		expect(shown(crude({ messages }, { "1.jpg": image(2) }), chatml)).toContain("user\n[0]What?<|im_end|>");
	});

	test("a record may name the images that it has, and whole numbers are exact", () => {
		expect(shown(crude({ caption: "x", image: "v.jpg" }, { "v.jpg": image(1) }))).toBe("[0]·\n\nx·");
		const label = sample("ImageClassificationSample", { image: image(1), label: 2n ** 60n + 1n });
		expect(shown(label)).toContain("1152921504606846977");
	});

	test("a record's own system prompt, ShareGPT's calls of tools and OpenAI's weights are read", () => {
		const call = { from: "function_call", value: '{"name": "f", "arguments": {"x": 2.0}}' };
		const record = { system: "Be brief.", tools: '[{"name": "f"}]', conversations: [...conversation.slice(2), call] };
		const { turns, variables } = conversationOf(crude(record), prompts);
		expect(turns.map(({ role }) => role)).toEqual(["system", "user", "assistant", "assistant"]);
		expect(turns[0]!.fragments).toEqual(["Be brief."]);
		expect(JSON.stringify(turns[3])).toContain('"name":"f","arguments":{"x":');
		expect(variables).toEqual({ tools: [{ name: "f" }] });
		const first = conversationOf(crude({ ...record, conversations: [{ from: "system", value: "No." }] }), prompts);
		expect(first.turns.map(({ fragments }) => fragments)).toEqual([["No."]]);
		const messages = conversation.slice(2).map(({ from, value }) => ({ role: from, content: value, weight: 0 }));
		const weighed = crude({ messages: [...messages, { role: "assistant", content: "No.", weight: 1 }] });
		expect(shown(weighed, chatml)).toEndWith("\nSo.<|im_end|>\n<|im_start|>assistant\n·No.<|im_end|>·\n");
	});

	test("captions, questions, choices and interleaved documents", () => {
		expect(shown(sample("CaptioningSample", { image: image(1), caption: "A cat." }))).toBe("[0]·\nA cat.·");
		const vqa = { image: image(1), context: "How many?", answers: ["2", "3"], answer_weights: [0.2, 0.8] };
		expect(shown(sample("VQASample", vqa), chatml)).toContain("assistant\n·3<|im_end|>·");
		const choice = { image: image(1), context: "Which?", choices: ["red", "blue"], correct_choice_idx: 1 };
		expect(shown(sample("MultiChoiceVQASample", choice))).toBe("[0]·\nWhich?\nA. red\nB. blue\nB. blue·");
		expect(shown(sample("InterleavedSample", { sequence: ["a", image(1), "b"] }), chatml)).toBe("·a·[0]·b·");
		const similarity = { images: [image(1), image(2)], texts: ["x", "y"], matched_text_indices: [1, 0] };
		expect(shown(sample("SimilarityInterleavedSample", similarity))).toBe("[1]·x·[0]·\ny·");
	});

	for (const [what, of, reason] of [
		[
			"more tags than images",
			crude({ conversations: conversation }, { "a.jpg": image(1) }),
			"2 <image> tags and 1 image",
		],
		[
			"a tag of the assistant",
			crude({ conversations: [{ from: "gpt", value: "<image>" }] }, { "a.jpg": image(1) }),
			"assistant's turn",
		],
		[
			"an unknown speaker",
			crude({ conversations: [{ from: "narrator", value: "x" }] }),
			'a turn of "narrator"; speakers of plain are system, user, assistant; a chat template (--chat-template) may know more',
		],
		[
			"a call of a tool beside text",
			crude({ messages: [{ role: "assistant", content: "Wait.", tool_calls: [{}] }] }),
			"a turn that calls tools, which plain cannot write",
		],
		[
			"a call of a tool",
			crude({ messages: [{ role: "assistant", content: null, tool_calls: [{}] }] }),
			"a turn that calls tools, which plain cannot write",
		],
		["tools that are no list", crude({ conversations: [], tools: "none" }), "its tools are not a list"],
		[
			"a call that is no JSON",
			crude({ conversations: [{ from: "function_call", value: "f(2)" }] }),
			"a turn of function_call that is no JSON of a name and arguments",
		],
		["no text", crude({ id: 3 }), "neither a conversation nor text"],
		["a question without answers", sample("VQASample", { image: image(1), context: "?", answers: [] }), "no answers"],
		[
			"a video part",
			crude({ text: "What is <video>?" }, { mp4: new Uint8Array(9) }),
			"its part mp4 is a video, and video is not built",
		],
		["a video beside an image", crude({ text: "x" }, { "a.MOV": 1, "b.jpg": image(1) }), "its part a.MOV is a video"],
		["a sound", crude({ text: "x" }, { "0.flac": 1 }), "its part 0.flac is audio, and audio is not built"],
		["a named video", crude({ text: "x", video: "v.mp4" }), 'its field video names "v.mp4"'],
		[
			"a named image without its part",
			crude({ caption: "x", image: "v.jpg" }),
			"but it has no image part; images are read from",
		],
		["a tool's turn", crude({ messages: [{ role: "tool", content: "x" }] }), 'a turn of "tool"; speakers of plain are'],
		[
			"content of another type",
			crude({ messages: [{ role: "user", content: [{ type: "file", file: "x" }] }] }, { "a.jpg": image(1) }),
			'content of type "file"; it is made of text and image',
		],
		["a video", sample("VidQASample", { video: 1, context: "?" }), "no text"],
	] as const) {
		test(`${what} is refused`, () => expect(() => shown(of)).toThrow(reason));
	}
});

const imageTokenId = 300;
const tower = { patchSize: 16, pixelShuffle: true, dropClassTokens: true, classTokens: 0 };

function encode(of: Sample, changed: Partial<Parameters<typeof encodePieces>[4]> & { tags?: [string, string] } = {}) {
	const { tags = ["", ""], ...options } = changed;
	const { images, ...rest } = conversationOf(of, prompts);
	const pieces = render("s", { images, ...rest }, { template: "chatml", lossRoles: null, imageTags: tags });
	const decodable = images.map((image) => decodedAs(image, "energon"));
	return encodePieces("s", pieces, decodable, byteTokenizer, {
		sequenceLength: 200,
		mostPatches: null,
		imageTokenId,
		beginId: null,
		endId: null,
		sizing: { mode: "fixed", width: 64, height: 32 },
		tower,
		tooLong: "truncate",
		...options,
	});
}

const two = () => crude({ conversations: conversation }, { "img0.jpg": image(1), "img1.jpg": image(2) });

describe("encoding", () => {
	test("an image has a token for each of its rows; labels are the next tokens that count", () => {
		const { ids, labels, images } = encode(two());
		expect(ids.filter((id) => id === imageTokenId).length).toBe(4);
		expect(images.length).toBe(2);
		const learned = [...labels].flatMap((label, t) => (label === ignored ? [] : [[t, label]]));
		expect(learned.every(([t, label]) => ids[t! + 1] === label)).toBe(true);
		const text = String.fromCharCode(...learned.map(([, label]) => label!));
		expect(text).toBe("Both.<|im_end|>So.<|im_end|>");
		expect(labels.at(-1)).toBe(ignored);
	});

	test("a position of an image has no label, and no label is an image", () => {
		const document = sample("InterleavedSample", { sequence: ["ab", image(1), "cd"] });
		const { ids, labels } = encode(document, { beginId: 1, endId: 2 });
		expect([...ids]).toEqual([1, 97, 98, 300, 300, 99, 100, 2]);
		expect([...labels]).toEqual([97, 98, -100, -100, -100, 100, 2, -100]);
	});

	test("truncation drops whole images, with their tags and all later tokens", () => {
		const document = sample("InterleavedSample", { sequence: ["ab", image(1), "cd", image(2), "ef"] });
		const lengths = new Map<number, [tokens: number, images: number]>();
		for (let sequenceLength = 2; sequenceLength <= 16; sequenceLength++) {
			const { ids, images } = encode(document, { sequenceLength, tags: ["(", ")"] });
			lengths.set(sequenceLength, [ids.length, images.length]);
			expect(ids.filter((id) => id === imageTokenId).length).toBe(2 * images.length);
			expect(ids.filter((id) => id === 40).length).toBe(images.length);
		}
		expect(lengths.get(5)).toEqual([2, 0]);
		expect(lengths.get(6)).toEqual([6, 1]);
		expect(lengths.get(9)).toEqual([8, 1]);
		expect(lengths.get(12)).toEqual([12, 2]);
		expect(lengths.get(16)).toEqual([14, 2]);
	});

	test("images are resized before text is truncated", () => {
		const sizing = { mode: "dynamic", minPatches: 4, maxPatches: 0, minSide: 0 } as const;
		const of = sample("InterleavedSample", { sequence: ["ab", image(512), image(256), "cd"] });
		const { ids, images } = encode(of, { sizing, sequenceLength: 100 });
		expect(images.length).toBe(2);
		expect(ids.length).toBeLessThanOrEqual(100);
		expect(ids.length).toBeGreaterThan(70);
		expect([...ids.slice(-2)]).toEqual([99, 100]);
	});

	test("images become smaller, or are left out with all later tokens, for a bound of patches", () => {
		const sizing = { mode: "dynamic", minPatches: 4, maxPatches: 0, minSide: 0 } as const;
		const of = sample("InterleavedSample", { sequence: ["ab", image(512), image(256), "cd"] });
		const patchesOf = (changed: Parameters<typeof encode>[1]) =>
			encode(of, changed).images.reduce((sum, { plan }) => sum + planPatches(plan, 16), 0);
		expect(patchesOf({ sizing, sequenceLength: 1000 })).toBe(32 ** 2 + 16 ** 2);
		for (const mostPatches of [400, 100]) {
			expect(patchesOf({ sizing, sequenceLength: 1000, mostPatches })).toBeLessThanOrEqual(mostPatches);
			expect(patchesOf({ sizing, sequenceLength: 1000, mostPatches })).toBeGreaterThan(0.8 * mostPatches);
		}
		// Images of 64 × 32 pixels, which stay as they are.
		const { ids, images } = encode(of, { mostPatches: 15 });
		expect([[...ids], images.length]).toEqual([[97, 98, 300, 300], 1]);
		expect(() => encode(of, { mostPatches: 15, tooLong: "skip" })).toThrow(
			"Sample s has 16 patches, more than packing-max-patches 15.",
		);
	});

	test("a sample without a label within the limit is refused", () => {
		expect(() => encode(two(), { sequenceLength: 20 })).toThrow("no token within 20 that counts");
		const unanswered = crude({ messages: [{ role: "system", content: "Be brief." }] });
		expect(() => encode(unanswered, {})).toThrow("Sample s has no turn that counts in the loss.");
	});

	test("a sample that is too long is truncated, or skipped with its length", () => {
		const whole = encode(two()).ids.length;
		expect(encode(two(), { sequenceLength: whole, tooLong: "skip" }).ids.length).toBe(whole);
		expect(encode(two(), { sequenceLength: whole - 1 }).ids.length).toBe(whole - 1);
		expect(() => encode(two(), { sequenceLength: whole - 1, tooLong: "skip" })).toThrow(
			`Sample s has ${whole} tokens, more than seq-length ${whole - 1}`,
		);
	});

	test("tiles have their tags before their rows, and are fewer where the tags leave no room", () => {
		const sizing = {
			...({ mode: "tiles", tileSize: 32, minTiles: 1, maxTiles: 4, areaWeighted: false } as const),
			...{ thumbnail: true, tags: true },
		};
		const of = sample("InterleavedSample", { sequence: ["ab", { ...image(64), width: 128 }, "cd"] });
		const shownIds = (ids: Int32Array) =>
			[...ids].map((id) => (id === imageTokenId ? "#" : String.fromCharCode(id))).join("");
		expect(shownIds(encode(of, { sizing }).ids)).toBe("ab<tile_1>#<tile_2>#<tile_global_thumbnail>#cd");
		expect(shownIds(encode(of, { sizing, sequenceLength: 40 }).ids)).toBe("ab<tile_1>#cd");
	});

	test("the image token in the text is refused", () => {
		const of = sample("TextSample", { text: "abc" });
		expect(() => encode(of, { imageTokenId: 98 })).toThrow("image token 98 in its text");
	});
});

describe("packs and batches", () => {
	test("samples are contiguous, and padding is a separate sequence", () => {
		const of = (key: string, ids: number[]) => ({
			restoreKey: [],
			key,
			sources: [],
			ids: Int32Array.from(ids),
			// As encoded: a token's label is the next one, and the last token has none.
			labels: Int32Array.from(ids, (_, at) => ids[at + 1] ?? -100),
			images: [],
		});
		const packs = [
			{ restoreKey: [], samples: [of("a", [1, 2]), of("b", [3])] },
			{ restoreKey: [], samples: [of("c", [4, 5, 6, 7, 8])] },
			{ restoreKey: [], samples: [of("d", [9])] },
		];
		const { text, spans, names } = buildBatch(packs, { padTo: 5, padId: 0 });
		expect(names).toEqual(["a", "b", "c", "d"]);
		expect([...text.ids]).toEqual([1, 2, 3, 0, 0, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0]);
		expect([...text.labels]).toEqual([2, -100, -100, -100, -100, 5, 6, 7, 8, -100, -100, -100, -100, -100, -100]);
		expect([...text.lossMask]).toEqual([1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
		expect(text.lengths).toEqual([2, 1, 2, 5, 1, 4]);
		expect(text.samples).toEqual([5, 5, 5]);
		expect(spans.map(([begin, end]) => [...text.ids.subarray(begin, end)])).toEqual([
			[1, 2],
			[3],
			[4, 5, 6, 7, 8],
			[9],
		]);
		expect(text.padding).toBe(6);
		expect(buildBatch(packs, { padTo: null, padId: 0 }).text.lengths).toEqual([2, 1, 5, 1]);
	});
});
