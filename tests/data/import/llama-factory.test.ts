/** LLaMA-Factory folders: dataset_info.json names files, fields and roles. */
import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { png, Scratch } from "../fixtures.ts";
import { importing, membersOf } from "./importing.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const info = {
	// As in LLaMA-Factory's own data/dataset_info.json.
	mllm_demo: {
		file_name: "mllm_demo.json",
		formatting: "sharegpt",
		columns: { messages: "messages", images: "images" },
		tags: { role_tag: "role", content_tag: "content", user_tag: "user", assistant_tag: "assistant" },
	},
	glaive: { file_name: "glaive.json", formatting: "sharegpt", columns: { messages: "conversations", tools: "tools" } },
	vqa: {
		file_name: "vqa.jsonl",
		columns: {
			prompt: "frage",
			query: "zusatz",
			response: "antwort",
			history: "zuvor",
			system: "rolle",
			images: "bilder",
		},
	},
	identity: { file_name: "identity.json" },
	c4_demo: { file_name: "c4_demo.jsonl", columns: { prompt: "words" } },
	hub: { hf_hub_url: "somebody/something" },
	gone: { file_name: "gone.json" },
	outside: { file_name: "../outside.json" },
	table: { file_name: "table.csv" },
	other: { file_name: "identity.json", formatting: "chatml" },
	dpo: { file_name: "identity.json", ranking: true, columns: { prompt: "a", chosen: "b", rejected: "c" } },
};
const turn = (from: string, value: string) => ({ from, value });
for (const [name, content] of Object.entries<unknown>({
	"dataset_info.json": info,
	"mllm_demo.json": [
		{
			messages: [
				{ role: "user", content: "<image>Who?" },
				{ role: "assistant", content: "A red dot." },
			],
			images: ["img/1.png"],
		},
		{ messages: "nothing" },
		{ messages: [{ content: "Nobody's." }] },
	],
	"glaive.json": [
		{ conversations: [turn("system", "Be brief."), turn("human", "Hm?"), turn("gpt", "Yes.")] },
		{
			conversations: [
				turn("human", "Warm?"),
				turn("function_call", '{"name": "degrees", "arguments": {"place": "here", "digits": 2.0}}'),
				turn("observation", "21.50"),
				turn("gpt", "Yes."),
			],
			tools: '[{"name": "degrees"}]',
		},
		{ conversations: [turn("human", "Warm?"), turn("function_call", "degrees(here)")] },
		{ conversations: [turn("human", "Warm?"), turn("function_call", '{"name": "degrees"}')] },
		{ conversations: [{ from: "human", value: "Warm?" }, { from: "function_call" }] },
		{ conversations: [turn("human", "Warm?"), turn("gpt", "Yes.")], tools: "{}" },
	],
	"vqa.jsonl": {
		frage: "Which colour?",
		zusatz: "One word.",
		antwort: "Red.",
		zuvor: [["Hello.", "Hello!"]],
		rolle: "Be brief.",
		bilder: ["img/1.png"],
		messages: "unnamed",
	},
	"identity.json": [{ instruction: "Who are you?", input: "", output: "mimo." }],
	"c4_demo.jsonl": { words: "Plain text." },
	"table.csv": "instruction,output\na,b\n",
})) {
	scratch.file(`folder/${name}`, typeof content === "string" ? content : JSON.stringify(content));
}
scratch.file("outside.json", '[{"instruction": "a", "output": "b"}]');
scratch.file("folder/img/1.png", png(8, 8, 1));
const folder = join(scratch.path, "folder");

let imports = 0;
const output = () => join(scratch.path, `set-${imports++}`);

/** Samples of a data set of the folder, and the reasons for skipped rows. */
async function imported(dataset: string): Promise<{ samples: unknown[]; images: number; skipped: readonly string[] }> {
	const set = output();
	const { images, skipped } = await importing(folder, set, { dataset, skipLimit: { share: 0.9 } });
	const records = Object.values(membersOf(set)).filter((value) => value.startsWith("{"));
	return { samples: records.map((text) => JSON.parse(text)), images, skipped: skipped.map(({ reason }) => reason) };
}

test("sharegpt with columns and tags", async () => {
	expect(await imported("mllm_demo")).toEqual({
		samples: [
			{
				messages: [
					{ role: "user", content: "<image>Who?" },
					{ role: "assistant", content: "A red dot." },
				],
			},
		],
		images: 1,
		skipped: ["it has no list of turns in messages", "turn N has no role"],
	});
});

test("sharegpt with usual tags, and with tools", async () => {
	const messages = [
		{ role: "system", content: "Be brief." },
		{ role: "user", content: "Hm?" },
		{ role: "assistant", content: "Yes." },
	];
	const call = { name: "degrees", arguments: { place: "here", digits: 2 } };
	const calling = {
		messages: [
			{ role: "user", content: "Warm?" },
			{ role: "assistant", tool_calls: [{ type: "function", function: call }] },
			{ role: "observation", content: "21.50" },
			{ role: "assistant", content: "Yes." },
		],
		tools: [{ name: "degrees" }],
	};
	const { samples, skipped } = await imported("glaive");
	expect(samples).toEqual([{ messages }, calling]);
	expect(skipped).toEqual([
		"turn N calls tools, but not by name and arguments",
		"its field tools is not a list",
		expect.stringMatching(/^turn N, which calls tools, is not JSON \(/),
	]);
});

test("alpaca with a history, a system prompt and a picture", async () => {
	const messages = [
		{ role: "system", content: "Be brief." },
		{ role: "user", content: "Hello." },
		{ role: "assistant", content: "Hello!" },
		{ role: "user", content: "Which colour?\nOne word." },
		{ role: "assistant", content: "Red." },
	];
	expect(await imported("vqa")).toEqual({ samples: [{ messages }], images: 1, skipped: [] });
});

test("alpaca with usual columns, and plain text", async () => {
	const messages = [
		{ role: "user", content: "Who are you?" },
		{ role: "assistant", content: "mimo." },
	];
	expect((await imported("identity")).samples).toEqual([{ messages }]);
	expect((await imported("c4_demo")).samples).toEqual([{ text: "Plain text." }]);
});

test("a folder with a single data set, by the command", async () => {
	const single = scratch.file("single/dataset_info.json", JSON.stringify({ only: { file_name: "a.json" } }));
	scratch.file("single/a.json", '[{"instruction": "a", "output": "b"}]');
	const set = output();
	const command = [
		"bun",
		join(import.meta.dir, "../../../src/main.ts"),
		"data",
		"import",
		join(single, ".."),
		"--output",
		set,
	];
	const run = Bun.spawnSync(command, { stderr: "pipe" });
	expect(run.stderr.toString()).toContain(
		"the data set only of a LLaMA-Factory folder (alpaca) (--from llama-factory)",
	);
	expect(run.exitCode).toBe(0);
	const again = Bun.spawnSync([...command, "--dataset", "other"], { stderr: "pipe" });
	expect(again.stderr.toString()).toContain(`--dataset other: ${single} describes only.`);
	expect(again.exitCode).toBe(1);
});

const where = join(folder, "dataset_info.json");
const refused: readonly (readonly [dataset: string | null, message: string])[] = [
	[null, `${where} describes several data sets: choose ${Object.keys(info).join(", ")} with --dataset.`],
	["hub", `${where}: the data set hub names no file_name: download its files first.`],
	["gone", `${where}: the data set gone is in ${folder}/gone.json, which does not exist.`],
	["outside", `${where}: the data set outside has the file_name ../outside.json, outside of the folder.`],
	[
		"table",
		`${where}: the data set table is in ${folder}/table.csv, which does not hold JSON records: import it alone.`,
	],
	["other", `${where}: the data set other has the formatting "chatml"; alpaca, sharegpt, openai are read.`],
	["dpo", `${where}: the data set dpo has preferences between answers, which are not imported.`],
];
test.each(refused)("refuses %p", async (dataset, message) => {
	await expect(importing(folder, output(), { dataset })).rejects.toThrow(message);
});

test("refuses flags that do not fit", async () => {
	const columns = { images: null, text: "a", question: null, answer: null };
	await expect(importing(folder, output(), { dataset: "vqa", columns })).rejects.toThrow("names the columns itself");
	const alone = join(folder, "vqa.jsonl");
	await expect(importing(alone, output(), { dataset: "vqa" })).rejects.toThrow("is not a LLaMA-Factory folder");
});
