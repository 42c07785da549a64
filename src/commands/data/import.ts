/** `mimo data import`: makes an Energon data set from images, tables, JSON, Hugging Face data sets and tar files. */
import { defineCommand } from "citty";
import { type ImportKind, importKinds } from "../../data/import/detect.ts";
import type { ImportResult } from "../../data/import/import.ts";
import { print } from "../../observe/output.ts";
import { counted } from "../../system/counted.ts";
import { datasetPath, flagError } from "../arguments.ts";

const args = {
	path: {
		type: "positional",
		required: true,
		description: "Files or folders of one form.",
		valueHint: "PATH…",
	},
	output: {
		type: "string",
		required: true,
		valueHint: "FOLDER",
		description: "Folder of the data set; an import that was interrupted continues.",
	},
	from: {
		type: "string",
		valueHint: Object.keys(importKinds).join("|"),
		description: "Form of the files; unset: recognised.",
	},
	"image-column": { type: "string", description: "Fields with images, separated by commas; unset: common names." },
	"text-column": { type: "string", description: "Field with the caption or text." },
	"question-column": { type: "string", description: "Field with the question." },
	"answer-column": { type: "string", description: "Field with the answer." },
	"image-root": {
		type: "string",
		description: "Folder that image paths are relative to; unset: the folder of the file that names them.",
	},
	dataset: {
		type: "string",
		valueHint: "NAME",
		description: "Data set of a LLaMA-Factory folder; unset: its only one.",
	},
	header: {
		type: "boolean",
		default: true,
		description: "--no-header: the table has no header row, and its columns are named 1, 2, …",
	},
	delimiter: {
		type: "string",
		description: "Character between the cells of a table; unset: comma, semicolon or tab by the header line.",
	},
	"split-ratio": {
		type: "string",
		description:
			"Shares of train, val and test, such as 98,1,1; unset: the source's parts, or all in train where it has none.",
	},
	"shard-samples": { type: "string", default: "10000", description: "Most samples of a shard." },
	"shard-size": { type: "string", default: "512", description: "Mebibytes after which a shard is full." },
	shuffle: {
		type: "string",
		valueHint: "SEED",
		description: "Shuffle with this seed; unset: the order of the source.",
	},
	"skip-limit": { type: "string", default: "10%", description: "Rows that may be skipped: a number, or a share." },
	decode: { type: "boolean", description: "Decode every image instead of reading its header alone." },
	"private-addresses": {
		type: "boolean",
		description: "Fetch images of URLs inside this machine's own network too.",
	},
} as const;

function integer(text: string, flag: string, from: number, to: number): number {
	const value = /^\d{1,15}$/.test(text) ? Number(text) : Number.NaN;
	if (value >= from && value <= to) return value;
	throw flagError(flag, text, `an integer from ${from} to ${to}`);
}

function shares(text: string): readonly [number, number, number] {
	const numbers = text.split(",").map((share) => (share.trim() === "" ? Number.NaN : Number(share)));
	const total = numbers.reduce((sum, share) => sum + share, 0);
	if (numbers.length === 3 && numbers.every((share) => share >= 0) && total > 0 && Number.isFinite(total)) {
		return [numbers[0]!, numbers[1]!, numbers[2]!];
	}
	throw flagError("split-ratio", text, "three shares of train, val and test, such as 98,1,1");
}

function kindOf(text: string): ImportKind {
	if (Object.hasOwn(importKinds, text)) return text as ImportKind;
	throw flagError("from", text, Object.keys(importKinds).join(", "));
}

function delimiterOf(text: string): string {
	const character = text === "\\t" ? "\t" : text;
	if (character.length === 1 && !/["\r\n]/.test(character)) return character;
	throw flagError("delimiter", text, "one character, \\t for a tab");
}

export default defineCommand({
	meta: { name: "import", description: "Make a data set from images, CSV, JSON, Parquet, save_to_disk or tar files." },
	args,
	run: async ({ args: given }) => {
		const { importData, SKIPPED_LIST } = await import("../../data/import/import.ts");
		const { parseSkipLimit, skippedLines } = await import("../../data/import/journal.ts");
		const { Images } = await import("../../native/images.ts");
		const { openLibrary } = await import("../../native/library.ts");
		const output = datasetPath(given.output);
		const options = {
			paths: given._.map(datasetPath),
			output,
			from: given.from === undefined ? null : kindOf(given.from),
			columns: {
				images: given["image-column"]?.split(",") ?? null,
				text: given["text-column"] ?? null,
				question: given["question-column"] ?? null,
				answer: given["answer-column"] ?? null,
			},
			table: { header: given.header, delimiter: given.delimiter === undefined ? null : delimiterOf(given.delimiter) },
			imageRoot: given["image-root"] ?? null,
			dataset: given.dataset ?? null,
			shares: given["split-ratio"] === undefined ? null : shares(given["split-ratio"]),
			shardSamples: integer(given["shard-samples"], "shard-samples", 1, 10_000_000),
			shardBytes: integer(given["shard-size"], "shard-size", 1, 1_000_000) * 2 ** 20,
			shuffle: given.shuffle === undefined ? null : integer(given.shuffle, "shuffle", 0, 2 ** 32 - 1),
			skipLimit: parseSkipLimit(given["skip-limit"]),
			decode: given.decode ?? false,
			privateAddresses: given["private-addresses"] ?? false,
			report: (line: string) => process.stderr.write(`${line}\n`),
		};
		const result = await importData(options, new Images(await openLibrary("cpu")));
		if (result.wasDone) process.stderr.write(`${output} was complete already\n`);
		for (const line of summary(result)) print(line);
		const { skipped } = result;
		if (skipped.length > 0) {
			const count = skipped.reduce((sum, reason) => sum + reason.count, 0);
			print(`${count} of ${result.rows} rows skipped; ${output}/${SKIPPED_LIST} lists all:`);
			for (const line of skippedLines(skipped)) print(line);
		}
		const set = /[^\w./:@%+=,-]/u.test(output) ? `'${output.replaceAll("'", "'\\''")}'` : output;
		print(
			`Look at it: mimo data info ${set}; train on it: mimo train with --data-path ${set}, after mimo data preview with the same flags`,
		);
	},
});

function summary({ samples, images, rows, parts }: ImportResult): string[] {
	const divided = parts.map((one) => `${one.part} ${one.samples} in ${counted(one.shards, "shard")}`);
	return [
		`${counted(samples, "sample")} with ${counted(images, "image")} of ${counted(rows, "row")}: ${divided.join(", ")}`,
	];
}
