/** Help and documentation of the configuration, made from the schema. */
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import type { Field } from "./field.ts";
import { keyHint } from "./names-elsewhere.ts";
import { fieldOf, type Key, spellings, subjects } from "./schema.ts";
import { upstreamFlagTexts } from "./upstream-flags.ts";

/** The default as text. */
function defaultOf(field: Field): string {
	if (field.presence === "required") return "required";
	if (field.presence === "derived") return field.derivation!;
	if (field.presence === "optional") return "unset";
	return Array.isArray(field.default) ? field.default.join(",") : String(field.default);
}

/** The description with remarks about effect and Megatron's default. */
function sentences(field: Field): string {
	const parts = [field.description];
	if (field.alwaysOn) parts.push("Always so here.");
	if (field.noEffect !== undefined) parts.push(`Without effect here: ${field.noEffect}.`);
	if (field.megatron !== undefined) parts.push(`Megatron's default: ${field.megatron}.`);
	return parts.join(" ");
}

const groups = Object.entries(subjects).map(([subject, group]) => ({
	subject,
	keys: Object.keys(group) as Key[],
}));

/** Keys that most trainings give; the short help shows them. */
const everyday: readonly Key[] = [
	...(["preset", "device", "seed", "load-hf", "load-vision", "load-projector", "data-path", "tokenizer"] as const),
	...(["conversation-template", "seq-length", "train-iters", "train-samples", "train-epochs"] as const),
	...([
		"micro-batch-size",
		"global-batch-size",
		"lr",
		"min-lr",
		"lr-decay-style",
		"lr-warmup-iters",
		"weight-decay",
		"clip-grad",
	] as const),
	...(["bf16", "freeze-vit", "freeze-projection", "freeze-lm", "lora-rank", "lora-alpha", "load-peft"] as const),
	...(["save-peft", "encoder-tp", "encoder-dp", "llm-offset", "llm-tp", "llm-pp", "llm-dp", "llm-ep"] as const),
	...(["use-distributed-optimizer", "recompute-granularity", "save", "save-interval", "load", "save-hf"] as const),
	...(["eval-interval", "eval-iters", "log-interval", "log-json", "tensorboard-dir"] as const),
];

/** Whether a key changes nothing, whatever its value. */
const isInert = (key: Key) => fieldOf(key).alwaysOn || fieldOf(key).noEffect !== undefined;

/** Flags with their descriptions and defaults, by subject. */
function flagHelp(wanted: (key: Key) => boolean): string {
	return groups
		.map(({ subject, keys }) => ({ subject, keys: keys.filter(wanted) }))
		.filter(({ keys }) => keys.length > 0)
		.map(({ subject, keys }) => {
			const lines = keys.map((key) => {
				const field = fieldOf(key);
				const value = field.type.kind === "boolean" ? "" : ` ${field.type.placeholder}`;
				return `  --${key}${value}\n      ${sentences(field)} [${defaultOf(field)}]`;
			});
			return `${subject}\n${lines.join("\n")}`;
		})
		.join("\n\n");
}

/** Flags whose name, other spelling or description has every one of the words. Throws a UserError when no flag matches. */
export function flagsAbout(words: readonly string[]): string {
	const plain = (text: string) => text.toLowerCase().replaceAll("_", "-").replace(/^--/, "");
	const text = flagHelp((key) => {
		const field = fieldOf(key);
		const about = [key, ...(field.aliases ?? []), sentences(field)].map(plain).join("\n");
		return words.every((word) => about.includes(plain(word)));
	});
	if (text !== "") return text;
	const hint = keyHint(plain(words.join("-")), spellings, "--");
	throw new UserError(`--help ${words.join(" ")}: no flag's name or description has that${hint}.`, exitCodes.usage);
}

/**
 * The help that a command's arguments ask for: `usage` with the everyday flags, with every flag (--help all), or the flags
 * about the words behind --help; null without --help.
 */
export function askedHelp(args: readonly string[], usage: string): string | null {
	const at = args.findIndex((argument) => argument === "--help" || argument === "-h");
	if (at < 0) return null;
	const words = args.slice(at + 1).filter((word) => !word.startsWith("-"));
	if (words.length === 1 && words[0] === "all") {
		const inert = groups.flatMap(({ keys }) => keys.filter(isInert)).map((key) => `  --${key}`);
		return `${usage}\n\n${flagHelp((key) => !isInert(key))}\n\nAccepted, and without effect here\n${inert.join("\n")}`;
	}
	if (words.length > 0) return flagsAbout(words);
	const others = groups.flatMap(({ keys }) => keys).length - everyday.length;
	return `${usage}\n\n${flagHelp((key) => everyday.includes(key))}\n\n${others} more flags: --help all shows them, --help WORD those about a word.`;
}

/** The generated part of docs/configuration.md: differences from Megatron, then a table a subject. */
export function configurationMarkdown(): string {
	const table = (rows: string[][], head: string[]) =>
		[head, head.map(() => "---"), ...rows].map((row) => `| ${row.map(cell).join(" | ")} |`).join("\n");
	const all = groups.flatMap(({ keys }) => keys);
	const different = all.filter((key) => fieldOf(key).megatron !== undefined);
	const inert = all.filter(isInert);
	return [
		"## Defaults that differ from Megatron's",
		table(
			different.map((key) => [code(key), defaultOf(fieldOf(key)), fieldOf(key).megatron!]),
			["key", "here", "Megatron"],
		),
		"## Flags that are accepted and change nothing",
		table(
			inert.map((key) => [code(key), fieldOf(key).noEffect ?? "always so here"]),
			["key", "why"],
		),
		"## Flags of Megatron that are no keys here",
		table(
			[...upstreamFlagTexts()].map(([text, names]) => [names.map(code).join(" "), text]),
			["flags", "here"],
		),
		...groups.map(
			({ subject, keys }) =>
				`## ${subject}\n\n${table(
					keys.map((key) => [code(key), fieldOf(key).type.allowed, defaultOf(fieldOf(key)), fieldOf(key).description]),
					["key", "allowed", "default", "meaning"],
				)}`,
		),
	].join("\n\n");
}

const code = (key: string) => `\`${key}\``;
const cell = (text: string) => text.replaceAll("|", "\\|").replaceAll("*", "\\*");
