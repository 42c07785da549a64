/** `mimo data prepare-text`: makes Megatron's indexed data of JSON lines. */
import { defineCommand } from "citty";
import * as v from "valibot";
import { parseFlags } from "../../config/flags.ts";
import { tokenizerKeys } from "../../config/keys/tokenizer.ts";
import { fieldOf, type Key, propertyOf } from "../../config/schema.ts";
import { print } from "../../observe/output.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { flagError } from "../arguments.ts";

const help = `mimo data prepare-text --input FILE --output-prefix PREFIX [FLAGS]

  Encodes lines of JSON, a document each, to PREFIX_KEY_document.bin and .idx, which --data-path of mimo train and
  Megatron-LM read.

  --json-keys KEY…    Fields with a text, or a list of texts; each makes data of its own. Default: text.
  --append-eod        Put the token that ends a document behind every one.
  --data-end-id ID    That token; unset: the tokenizer's.
  --workers N         Threads that encode. Default: 1.
  --force-overwrite   Replace data that are there.

  Tokenizer, as for mimo train (unset: bytes):
${Object.keys(tokenizerKeys)
	.map((key) => `  --${key}`)
	.join("\n")}
  --vocab-size`;

/** Flags that are not keys of the configuration, and whether they take a value. */
const ownFlags = {
	...{ input: true, "output-prefix": true, "json-keys": true, workers: true },
	...{ "append-eod": false, "force-overwrite": false },
} as const;
const keysTaken: readonly Key[] = [...(Object.keys(tokenizerKeys) as Key[]), "vocab-size", "data-end-id"];

const command = defineCommand({
	meta: { name: "prepare-text", description: "Encode lines of JSON to Megatron's .bin and .idx files." },
	run: async ({ rawArgs }) => {
		if (rawArgs.includes("--help") || rawArgs.includes("-h")) {
			print(help);
			return;
		}
		const { entries, command: given, problems } = parseFlags(withJoinedKeys(rawArgs), ownFlags);
		const foreign = entries.find(({ key }) => !keysTaken.includes(key));
		const [problem] = problems;
		if (problem !== undefined) throw new UserError(`${problem.where}: ${problem.message}.`, exitCodes.usage);
		if (foreign !== undefined) {
			throw new UserError(`--${foreign.key} is no flag of \`mimo data prepare-text\`.`, exitCodes.usage);
		}
		const { input, "output-prefix": outputPrefix, workers = "1", "json-keys": keys = "text" } = given;
		if (input === undefined || outputPrefix === undefined) {
			const missing = input === undefined ? "input" : "output-prefix";
			throw new UserError(`--${missing} is missing: \`mimo data prepare-text --help\`.`, exitCodes.usage);
		}
		if (!/^[1-9]\d{0,2}$/.test(workers)) throw flagError("workers", workers, "an integer from 1 to 999");
		const value = checkedValues(entries);
		const { prepareText } = await import("../../data/megatron/prepare-text.ts");
		const names = [...Object.keys(tokenizerKeys), "vocab-size"] as Key[];
		const { documents, tokens, prefixes } = await prepareText({
			encoding: {
				tokenizer: Object.fromEntries(names.map((key) => [propertyOf(key), value(key)])) as never,
				keys: keys.split(","),
				path: input,
			},
			appended: given["append-eod"] === undefined ? null : ((value("data-end-id") as number | null) ?? "tokenizer's"),
			outputPrefix,
			workers: Number(workers),
			overwrite: given["force-overwrite"] !== undefined,
		});
		print(`${counted(documents, "document")} of ${counted(tokens, "token")} in ${prefixes.join(", ")}`);
	},
});
export default { ...command, ownFlags };

/** The arguments with those behind --json-keys as one: it takes any number, as Megatron's does. */
function withJoinedKeys(rawArgs: readonly string[]): string[] {
	const at = rawArgs.indexOf("--json-keys");
	if (at < 0) return [...rawArgs];
	const behind = rawArgs.slice(at + 1);
	const next = behind.findIndex((argument) => argument.startsWith("--"));
	const keys = next < 0 ? behind : behind.slice(0, next);
	return [...rawArgs.slice(0, at), `--json-keys=${keys.join(",")}`, ...behind.slice(keys.length)];
}

/** Values of keys, given or standing. Throws a UserError for a given one that is not of its type. */
function checkedValues(entries: readonly { readonly key: Key; readonly value: unknown }[]): (key: Key) => unknown {
	for (const { key, value } of entries) {
		const { type } = fieldOf(key);
		if (!v.is(type.schema, value)) throw flagError(key, String(value), type.allowed);
	}
	const given = new Map(entries.map(({ key, value }) => [key, value]));
	return (key) => (given.has(key) ? given.get(key) : fieldOf(key).default);
}
