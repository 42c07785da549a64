/** Reads and checks the parts of a tokenizer.json that this program uses, and that the tokenizer library trusts. */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";

/** Ids are places in a table. */
const id = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(2 ** 24));
const token = v.pipe(v.string(), v.minLength(1), v.maxLength(4096));
/** Characters of all added tokens: the library keeps a node for each. */
const LARGEST_ADDED = 2 ** 23;
/** Texts that the library inserts for every word or blank. */
const insertion = v.nullish(v.pipe(v.string(), v.maxLength(64)));

/** A step of normalization or splitting, with the steps within it. */
interface Step {
	readonly replacement?: string | null | undefined;
	readonly pretokenizers?: readonly (Step | null)[] | null | undefined;
}
const step: v.GenericSchema<Step> = v.looseObject({
	replacement: insertion,
	pretokenizers: v.nullish(v.array(v.nullable(v.lazy(() => step)))),
});

const schema = v.looseObject({
	added_tokens: v.optional(v.array(v.looseObject({ id, content: token, special: v.optional(v.boolean()) }))),
	pre_tokenizer: v.nullish(step),
	model: v.looseObject({
		continuing_subword_prefix: insertion,
		end_of_word_suffix: insertion,
		/** BPE and WordPiece: ids by token. Unigram: tokens with their scores. */
		vocab: v.union([v.record(v.string(), id), v.array(v.tuple([v.string(), v.number()]))]),
		unk_token: v.nullish(v.string()),
		merges: v.optional(v.array(v.union([v.string(), v.tuple([v.string(), v.string()])]))),
	}),
});

export type TokenizerFile = v.InferOutput<typeof schema>;

/** The content of a tokenizer.json. Throws a UserError that names the first malformed field. */
export function parseTokenizerFile(text: string, path: string): TokenizerFile {
	let json: unknown;
	try {
		json = JSON.parse(text);
	} catch (error) {
		throw new UserError(`The tokenizer file ${path} is not JSON: ${(error as Error).message}.`);
	}
	const { output, issues } = v.safeParse(schema, json, { abortEarly: true });
	if (issues !== undefined) {
		throw new UserError(`${path} is not a tokenizer.json: ${v.getDotPath(issues[0]) ?? "all of it"} is malformed.`);
	}
	const added = (output.added_tokens ?? []).reduce((sum, { content }) => sum + content.length, 0);
	if (added > LARGEST_ADDED) {
		throw new UserError(`${path} has added tokens of ${added} characters together; at most ${LARGEST_ADDED} are read.`);
	}
	return output;
}
