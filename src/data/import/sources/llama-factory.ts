/**
 * LLaMA-Factory folders: dataset_info.json describes data files, and names the fields and roles of their records
 * (https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md). Each record becomes a conversation in common names.
 */
import { dirname, join, relative } from "node:path";
import { UserError } from "../../../system/errors.ts";
import { jsonIn } from "../detect.ts";
import { earlierTurns, isGiven, type Row, SkippedRow, type SyncSource } from "../row.ts";

type Fields = Readonly<Record<string, unknown>>;

const formattings = ["alpaca", "sharegpt", "openai"];
/** Fields of records where an entry has no `columns`; with `columns`, those that it leaves out are absent. */
const usualColumns: Fields = { prompt: "instruction", query: "input", response: "output", messages: "conversations" };
/** Fields and names of roles in turns where an entry has no `tags`. */
const usualTags: Fields = {
	role_tag: "from",
	content_tag: "value",
	user_tag: "human",
	assistant_tag: "gpt",
	observation_tag: "observation",
	function_tag: "function_call",
	system_tag: "system",
};

/** One data set of a LLaMA-Factory folder. */
export interface FactoryEntry {
	readonly name: string;
	/** The data file, or a folder of them. */
	readonly path: string;
	readonly formatting: string;
	readonly columns: Fields;
	readonly tags: Fields;
}

/** The entry of a dataset_info.json with a name; null: its only entry. Throws a UserError for an entry that is not imported. */
export function factoryEntry(info: string, name: string | null): FactoryEntry {
	const entries = jsonIn(info) ?? {};
	const names = Object.keys(entries);
	if (name !== null && !Object.hasOwn(entries, name)) {
		throw new UserError(`--dataset ${name}: ${info} describes ${names.join(", ")}.`);
	}
	if (name === null && names.length > 1) {
		throw new UserError(`${info} describes several data sets: choose ${names.join(", ")} with --dataset.`);
	}
	const chosen = name ?? names[0]!;
	const entry = entries[chosen] as Fields;
	const refuse = (reason: string): never => {
		throw new UserError(`${info}: the data set ${chosen} ${reason}.`);
	};
	const { file_name: file, formatting = "alpaca", ranking, columns = usualColumns, tags = usualTags } = entry;
	if (typeof file !== "string") return refuse("names no file_name: download its files first");
	const path = join(dirname(info), file);
	if (relative(dirname(info), path).startsWith("..")) refuse(`has the file_name ${file}, outside of the folder`);
	if (!formattings.includes(formatting as string)) {
		refuse(`has the formatting ${JSON.stringify(formatting)}; ${formattings.join(", ")} are read`);
	}
	for (const [key, value] of Object.entries({ columns, tags })) {
		const isMap = typeof value === "object" && value !== null && !Array.isArray(value);
		if (!isMap) refuse(`has ${key} that are not an object`);
	}
	const preference = ["chosen", "rejected", "kto_tag"].some((column) => isGiven((columns as Fields)[column]));
	if (ranking === true || preference) refuse("has preferences between answers, which are not imported");
	return { name: chosen, path, formatting: formatting as string, columns: columns as Fields, tags: tags as Fields };
}

/** The rows of the entry's files as conversations. */
export function factorySource(source: SyncSource, identity: string, entry: FactoryEntry): SyncSource {
	const convert = entry.formatting === "alpaca" ? alpaca : sharegpt;
	return {
		description: `the data set ${entry.name} of a LLaMA-Factory folder (${entry.formatting})`,
		identity,
		columns: null,
		*rows(from): Generator<Row> {
			for (const row of source.rows(from)) yield { ...row, fields: converted(row.fields, entry, convert) };
		},
	};
}

type Convert = (fields: Fields, entry: FactoryEntry) => Fields;

function converted(fields: Row["fields"], entry: FactoryEntry, convert: Convert): Row["fields"] {
	if (fields instanceof SkippedRow) return fields;
	const of = (column: string) => fieldOf(fields, entry, column);
	try {
		return {
			...convert(fields, entry),
			system: of("system"),
			tools: of("tools"),
			images: of("images"),
			videos: of("videos"),
			audios: of("audios"),
		};
	} catch (error) {
		if (error instanceof SkippedRow) return error;
		throw error;
	}
}

/** A record's value of a column; undefined: the entry names no such column. */
function fieldOf(fields: Fields, { columns }: FactoryEntry, column: string): unknown {
	const name = columns[column];
	return typeof name === "string" && Object.hasOwn(fields, name) ? fields[name] : undefined;
}

/** A question of `prompt` and `query`, after the turns of `history`, with the answer of `response`; without one, plain text. */
function alpaca(fields: Fields, entry: FactoryEntry): Fields {
	const asked = ["prompt", "query"].map((column) => fieldOf(fields, entry, column)).filter(isGiven);
	const question = asked.join("\n");
	if (!isGiven(entry.columns.response)) return { text: question };
	return {
		messages: [
			...earlierTurns(fieldOf(fields, entry, "history")),
			{ role: "user", content: question },
			{ role: "assistant", content: fieldOf(fields, entry, "response") },
		],
	};
}

/** The turns of `messages`, with the entry's names of roles. */
function sharegpt(fields: Fields, entry: FactoryEntry): Fields {
	const turns = fieldOf(fields, entry, "messages");
	if (!Array.isArray(turns)) throw new SkippedRow(`it has no list of turns in ${String(entry.columns.messages)}`);
	const tag = (name: string) => String(entry.tags[name]);
	const roles = new Map<unknown, string>();
	for (const role of ["user", "assistant", "system", "observation", "function"]) {
		const named = role === "function" ? "function_call" : role;
		if (isGiven(entry.tags[`${role}_tag`])) roles.set(entry.tags[`${role}_tag`], named);
	}
	return {
		messages: turns.map((turn: Fields | null) => {
			const sender = turn?.[tag("role_tag")];
			return { ...turn, from: roles.get(sender) ?? sender, value: turn?.[tag("content_tag")] };
		}),
	};
}
