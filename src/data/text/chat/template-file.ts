/** The chat template of a tokenizer folder of Hugging Face, or of a file. */
import { existsSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import * as v from "valibot";
import { chatTemplateFile } from "../../../config/chat-template-file.ts";
import { UserError } from "../../../system/errors.ts";
import { readWholeText } from "../../../system/input-file.ts";
import { configLimits, readJsonText } from "../../../system/json.ts";
import { JinjaTemplate } from "./jinja.ts";

/** Plain values, so that they reach other threads. */
export interface ChatTemplateText {
	/** For messages. */
	readonly file: string;
	readonly text: string;
	/** bos_token, eos_token and the like of tokenizer_config.json: templates write them. */
	readonly specialTokens: Readonly<Record<string, string>>;
}

const token = v.union([
	v.string(),
	v.pipe(
		v.looseObject({ content: v.string() }),
		v.transform(({ content }) => content),
	),
]);
const configuration = v.looseObject({
	chat_template: v.nullish(v.union([v.string(), v.array(v.looseObject({ name: v.string(), template: v.string() }))])),
	...Object.fromEntries(
		["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"].map((name) => [
			name,
			v.nullish(token),
		]),
	),
});
type Configuration = v.InferOutput<typeof configuration>;

const configurationFile = "tokenizer_config.json";

/** Bytes of the largest template; published ones have some ten thousand. */
const LARGEST_TEMPLATE = 2 ** 20;

/**
 * The template at `path`: a file of Jinja text, a JSON file with a field chat_template, or a folder with either. Its special
 * tokens are those of tokenizer_config.json beside it, else beside `tokenizer`. Throws a UserError when `path` has no template.
 */
export function readChatTemplate(path: string, tokenizer: string | null): ChatTemplateText {
	const file = chatTemplateFile(path) ?? path;
	const inside = isFolder(path) ? path : undefined;
	const called = `the chat template ${file}`;
	const text = isFolder(file)
		? null
		: file.endsWith(".json")
			? templateOf(file, inside)
			: readWholeText(file, LARGEST_TEMPLATE, { inside, called });
	if (text === null) throw noTemplate(path);
	// Throws for a template with mistakes here, before any sample is read with it.
	new JinjaTemplate(text, file);
	return { file, text, specialTokens: configuredTokens(file, ...(tokenizer === null ? [] : [tokenizer])) };
}

/** Special tokens by their names, such as eos_token, of the first of the paths with a tokenizer_config.json in or beside it. */
export function configuredTokens(...paths: readonly string[]): Record<string, string> {
	const places = paths.map((path) => (isFolder(path) ? path : dirname(path)));
	const place = places.find((place) => existsSync(join(place, configurationFile)));
	return place === undefined ? {} : specialTokensOf(readConfiguration(join(place, configurationFile), place));
}

function isFolder(path: string): boolean {
	return existsSync(path) && statSync(path).isDirectory();
}

function noTemplate(path: string): UserError {
	return new UserError(
		`${path} has no chat template: --chat-template takes a file of Jinja text, or a folder with chat_template.jinja or with a chat_template in tokenizer_config.json.`,
	);
}

/** The template of a JSON file; of several named ones that named default. */
function templateOf(file: string, inside: string | undefined): string | null {
	const { chat_template: template } = readConfiguration(file, inside);
	if (typeof template === "string") return template;
	if (!Array.isArray(template)) return null;
	const named = template.find(({ name }) => name === "default");
	if (named !== undefined) return named.template;
	const names = template.map(({ name }) => name).join(", ");
	throw new UserError(`${file} has chat templates of the names ${names}, and none is the default: give one as a file.`);
}

function specialTokensOf(config: Configuration): Record<string, string> {
	return Object.fromEntries(
		Object.entries(config).filter(
			(entry): entry is [string, string] => entry[0].endsWith("_token") && typeof entry[1] === "string",
		),
	);
}

function readConfiguration(file: string, inside: string | undefined): Configuration {
	const source = readJsonText(file, configLimits, { inside, called: `the chat template ${file}` });
	let json: unknown;
	try {
		json = JSON.parse(source);
	} catch (error) {
		throw new UserError(`${file} is not JSON: ${(error as Error).message}.`);
	}
	const { output, issues } = v.safeParse(configuration, json, { abortEarly: true });
	if (issues === undefined) return output;
	throw new UserError(
		`${file} is not a tokenizer_config.json: ${v.getDotPath(issues[0]) ?? "all of it"} is malformed.`,
	);
}
