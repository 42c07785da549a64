/** The same data give the same samples, whatever form they come in. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defaultLoadOptions } from "../../../src/data/energon/dataset.ts";
import { raiseError } from "../../../src/data/energon/errors.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import { lint } from "../../../src/data/energon/tools/lint.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import { inspectImage } from "../../../src/data/vision-language/pixels.ts";
import { previewSamples } from "../../../src/data/vision-language/preview.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { Scratch, tar } from "../fixtures.ts";
import { smallTask } from "../vision-language/task.ts";
import { golden, importing, membersOf } from "./importing.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const names = readdirSync(join(golden, "pictures"))
	.filter((name) => !name.endsWith(".txt"))
	.sort();
const bytesOf = (name: string) => readFileSync(join(golden, "pictures", name));
const captionOf = (name: string) => bytesOf(name.replace(/\..*/, ".txt")).toString();
const rows = names.map((name) => ({ image: `pictures/${name}`, caption: captionOf(name) }));
const quoted = (text: string) => `"${text.replaceAll('"', '""')}"`;
cpSync(join(golden, "pictures"), join(scratch.path, "pictures"), { recursive: true });

/** Imports what lies at `path`, and reads it back. */
let imports = 0;
async function samples(path: string, options: Parameters<typeof importing>[2] = {}): Promise<Record<string, string>> {
	const output = join(scratch.path, `set-${imports++}`);
	const result = await importing(path, output, options);
	expect(result.skipped).toEqual([]);
	const images = new Images(await openLibrary("cpu"));
	const decode = (bytes: Uint8Array) => inspectImage(images, bytes);
	const problems: string[] = [];
	lint(new LocalStorage(), output, { images: decode, check: null }, ({ what }) => problems.push(what));
	expect(problems).toEqual([]);
	return membersOf(output);
}

const captions = await samples(join(scratch.path, "pictures"));

describe("captions", () => {
	test("of a folder of pictures", () => {
		expect(Object.keys(captions).filter((name) => name.endsWith(".json"))).toHaveLength(names.length);
		expect(captions["train-000000.tar/000000001.json"]).toBe('{"caption":"a \\"quoted\\" word, and a comma"}');
		expect(Object.keys(captions).filter((name) => !name.endsWith(".json"))).toEqual(
			["png", "jpg", "webp", "gif", "bmp", "png"].map((suffix, i) => `train-000000.tar/00000000${i}.${suffix}`),
		);
	});

	const csv = rows.map(({ image, caption }) => `${image},${quoted(caption)}`).join("\n");
	const tsv = rows.filter(({ caption }) => !/[\n"]/.test(caption));
	const inText = (encode: (name: string) => unknown) =>
		rows.map(({ caption }, i) => JSON.stringify({ id: i, image: encode(names[i]!), caption })).join("\n");
	const base64 = (name: string) => bytesOf(name).toString("base64");
	const tarMembers = rows.flatMap(({ caption }, i) => [
		[names[i]!, bytesOf(names[i]!)] as const,
		[`${i}.json`, JSON.stringify({ caption, url: "http://host/a.png", key: String(i), status: "success" })] as const,
		[`${i}.txt`, caption] as const,
	]);
	const forms: readonly (readonly [string, string | Uint8Array, Parameters<typeof samples>[1]?])[] = [
		["table.csv", `image,caption\n${csv}\n`],
		["windows.csv", `\ufeffimage,caption,score\r\n${csv.replaceAll(/"\n/g, '",1\r\n')},2`],
		[
			"semicolons.csv",
			`caption;"a, b, c";image\n${rows.map(({ image, caption }) => `${quoted(caption)};;${image}`).join("\n")}`,
		],
		[
			"given.csv",
			`a;b;image,caption\n${csv}`,
			{
				table: { header: true, delimiter: "," },
				columns: { images: ["a;b;image"], text: "caption", question: null, answer: null },
			},
		],
		[
			"plain.csv",
			csv,
			{
				table: { header: false, delimiter: null },
				columns: { images: ["1"], text: "2", question: null, answer: null },
			},
		],
		["list.json", JSON.stringify(rows, null, "\t")],
		["lines.jsonl", rows.map((row) => JSON.stringify(row)).join("\n")],
		["base64.jsonl", inText(base64)],
		["uri.jsonl", inText((name) => `data:image/anything;base64,${base64(name)}`)],
		["absolute.jsonl", inText((name) => `file://${join(golden, "pictures", name)}`)],
		["named.jsonl", inText((name) => ({ bytes: null, path: `pictures/${name}` }))],
		["img2dataset.tar", tar(tarMembers)],
	];
	for (const [name, content, options] of forms) {
		test(name, async () => expect(await samples(scratch.file(name, content), options)).toEqual(captions));
	}

	test.each(["table.tsv", "tabs.csv"])("a table with tabs, %s", async (name) => {
		const lines = tsv.map(({ image, caption }) => `${image}\t${caption}\n`).join("");
		const found = await samples(scratch.file(name, `image\tcaption\n${lines}`));
		const texts = Object.values(found).filter((value) => value.startsWith("{"));
		expect(texts).toEqual(tsv.map(({ caption }) => JSON.stringify({ caption })));
	});

	for (const name of [
		"captions.parquet",
		"captions.zstd.parquet",
		"captions.gzip.parquet",
		"captions.brotli.parquet",
		"captions.lz4.parquet",
		"captions",
	]) {
		test(`Hugging Face: ${name}`, async () => expect(await samples(join(golden, name))).toEqual(captions));
	}
});

describe("conversations", async () => {
	type Message = { readonly role: string; readonly content: string };
	const talks = JSON.parse(readFileSync(join(golden, "talk.json"), "utf8")) as Message[][];
	const pictures = [[names[0]!, names[1]!], []];
	const paths = pictures.map((list) => list.map((name) => `pictures/${name}`));
	const sender: Readonly<Record<string, string>> = { system: "system", user: "human", assistant: "gpt" };
	const lines = (record: (talk: Message[], i: number) => unknown) =>
		talks.map((talk, i) => JSON.stringify(record(talk, i))).join("\n");
	const llava = (talk: Message[]) => talk.map(({ role, content }) => ({ from: sender[role], value: content }));
	const openai = (give: (name: string) => unknown) =>
		lines((talk, i) => {
			let image = 0;
			const parts = (content: string) =>
				content.split(/(<image>)/).map((text) => {
					return text === "<image>"
						? { type: "image_url", image_url: give(pictures[i]![image++]!) }
						: { type: "text", text };
				});
			return {
				messages: talk.map(({ role, content }) => ({ role, content: role === "user" ? parts(content) : content })),
			};
		});
	const talkTar = (json: (messages: Message[]) => unknown) =>
		tar(
			talks.flatMap((messages, i) => [
				...pictures[i]!.map((name, j) => [`${i}.${j}.${name.split(".")[1]}`, bytesOf(name)] as const),
				[`${i}.json`, JSON.stringify(json(messages))] as const,
			]),
		);
	const uri = (name: string) => `data:image/png;base64,${bytesOf(name).toString("base64")}`;
	const expected = await samples(join(golden, "talk.parquet"));
	const forms: readonly (readonly [string, string | Uint8Array])[] = [
		[
			"llava.json",
			`[${talks.map((talk, i) => JSON.stringify({ id: i, image: paths[i], conversations: llava(talk) })).join(",\n")}]`,
		],
		[
			"sharegpt.jsonl",
			lines((talk, i) => ({
				system: talk[0]!.role === "system" ? talk[0]!.content : "",
				conversations: llava(talk.filter(({ role }) => role !== "system")),
				images: paths[i],
			})),
		],
		["messages.jsonl", lines((messages, i) => ({ messages, images: paths[i] }))],
		["openai.jsonl", openai((name) => ({ url: uri(name) }))],
		["openai-paths.jsonl", openai((name) => `pictures/${name}`)],
		[
			"talk.csv",
			`messages,images\n${talks.map((talk, i) => `${quoted(JSON.stringify(talk))},${quoted(JSON.stringify(paths[i]))}`).join("\n")}\n`,
		],
		["talk.tar", talkTar((messages) => ({ messages }))],
		["turns.tar", talkTar(llava)],
	];
	for (const [name, content] of forms) {
		test(name, async () => expect(await samples(scratch.file(name, content))).toEqual(expected));
	}

	test("save_to_disk, with the parts that it has", async () => {
		const { "test-000000.tar/000000002.json": other, ...train } = await samples(join(golden, "talk"));
		expect(train).toEqual(expected);
		expect(other).toBe(expected["train-000000.tar/000000001.json"]);
	});

	test("a call of a tool in a table has its own arguments alone", async () => {
		const calls = await samples(join(golden, "calls.jsonl"));
		expect(JSON.stringify(calls)).toContain("4611686018427387904");
		for (const name of ["calls.parquet", "calls"]) expect(await samples(join(golden, name))).toEqual(calls);
	});

	test("turns of a prompt and a completion are a conversation whose prompt does not count", async () => {
		const [user, assistant] = [
			{ role: "user", content: "Hm?" },
			{ role: "assistant", content: "Yes." },
		];
		const record = { prompt: [user, assistant, user], completion: [assistant] };
		const read = await samples(scratch.file("completion.jsonl", JSON.stringify(record)));
		const prompt = record.prompt.map((turn) => ({ ...turn, weight: 0 }));
		expect(Object.values(read).map((text) => JSON.parse(text))).toEqual([{ messages: [...prompt, assistant] }]);
	});

	test("training reads them with images at their tags and a loss on every answer", async () => {
		const output = join(scratch.path, "trained");
		await importing(scratch.file("trained.jsonl", forms[2]![1]), output);
		const images = new Images(await openLibrary("cpu"));
		const [first] = previewSamples(new LocalStorage(), images, byteTokenizer, {
			path: output,
			load: defaultLoadOptions,
			task: { ...smallTask, sequenceLength: 512, template: "chatml" },
			seedOffset: 0,
			count: 2,
			onFailure: raiseError,
			remark: () => {},
		}).filter(({ images: { length } }) => length === 2);
		expect(first!.ids.filter((id) => id === smallTask.imageTokenId).length).toBeGreaterThanOrEqual(2);
		expect(byteTokenizer.decode([...first!.labels.filter((label) => label >= 0)])).toContain("A dot.");
	});
});

test("tools, calls of tools and reasoning stay for chat templates, other fields do not", async () => {
	const call = { id: "1", type: "function", function: { name: "degrees", arguments: '{"place": "here"}' } };
	const tools = [{ type: "function", function: { name: "degrees" } }];
	const messages = [
		{ role: "user", content: "Warm?" },
		{ role: "assistant", content: null, tool_calls: [call] },
		{ role: "tool", content: "21", name: "degrees", tool_call_id: "1" },
		{ role: "assistant", content: "", reasoning_content: "It is.", tool_calls: [call] },
		{ role: "assistant", content: "Yes." },
	];
	const noted = messages.map((message) => ({ ...message, weight: 1, tool_calls: [], ...message }));
	const found = await samples(scratch.file("tools.jsonl", JSON.stringify({ id: 7, messages: noted, tools })));
	expect(Object.values(found).map((text) => JSON.parse(text))).toEqual([{ messages, tools }]);
});

test("documents of OBELICS and MMC4, pairs of The Cauldron, questions with answers", async () => {
	const [a, b] = ["pictures/0.png", "pictures/1.jpg"];
	const records = [
		{ texts: ["before", null, "after", null], images: [null, a, null, b] },
		{
			text_list: ["one", "two"],
			image_info: [
				{ image_name: b, matched_text_index: 1 },
				{ image_name: a, matched_text_index: 0 },
			],
		},
		{
			images: [{ path: a }],
			texts: [
				{ user: "Q", assistant: "A", source: "s" },
				{ user: "R", assistant: "B", source: "s" },
			],
		},
		{ question: "How many?", answers: ["two", "2"], image: a },
		{ instruction: "Do", input: "this", output: "done" },
		{ system_prompt: "S", history: [["q", "a"]], instruction: "Sum up", context: "a text", response: "short" },
		{ input: "Ask", output: "told" },
		{ text: "only words" },
	];
	const found = await samples(scratch.file("kinds.jsonl", records.map((one) => JSON.stringify(one)).join("\n")));
	const texts = Object.values(found)
		.filter((value) => value.startsWith("{"))
		.map((value) => JSON.parse(value) as unknown);
	expect(texts).toEqual([
		{ texts: ["before", null, "after", null], images: [null, "0.png", null, "1.jpg"] },
		{ texts: [null, "one", null, "\ntwo"], images: ["1.png", null, "0.jpg", null] },
		{
			messages: [
				{ role: "user", content: "Q" },
				{ role: "assistant", content: "A" },
				{ role: "user", content: "R" },
				{ role: "assistant", content: "B" },
			],
		},
		{
			messages: [
				{ role: "user", content: "How many?" },
				{ role: "assistant", content: "two" },
			],
		},
		{
			messages: [
				{ role: "user", content: "Do\nthis" },
				{ role: "assistant", content: "done" },
			],
		},
		{
			messages: [
				{ role: "system", content: "S" },
				{ role: "user", content: "q" },
				{ role: "assistant", content: "a" },
				{ role: "user", content: "Sum up\na text" },
				{ role: "assistant", content: "short" },
			],
		},
		{
			messages: [
				{ role: "user", content: "Ask" },
				{ role: "assistant", content: "told" },
			],
		},
		{ text: "only words" },
	]);
	expect(found["train-000000.tar/000000001.1.png"]).toBe(found["train-000000.tar/000000000.0.png"]!);
});
