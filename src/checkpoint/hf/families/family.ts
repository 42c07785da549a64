/** A family of language models in Hugging Face's format: how its config.json and its tensors say a model of this program. */
import type { LanguageModelConfiguration } from "../../../config/language-model.ts";
import { modelDifferences } from "../../../config/same-model.ts";
import { UserError } from "../../../system/errors.ts";
import type { CorrespondenceBuilder } from "../../mapping.ts";
import { formatPythonJson, parsePythonJson } from "../json.ts";

export type { LanguageModelConfiguration };

/** The tensor names of a Hugging Face folder. */
export interface Spelling {
	/** model_type of the family; absent: nemotron_h. */
	readonly family?: string;
	/** In front of the layers and the embedding. */
	readonly base: string;
	/** In front of lm_head.weight. */
	readonly head: string;
	/**
	 * separate: a tensor for each expert (published checkpoints); packed: all experts of a layer stacked (transformers); transposed: so,
	 * each matrix [in, out] (Qwen3-VL's published ones).
	 */
	readonly experts: "separate" | "packed" | "transposed";
	/** In front of `mtp.layers.`; absent: nothing, also in vision-language models. */
	readonly mtp?: string;
}

export type Json = Readonly<Record<string, unknown>>;
type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

export interface NameOptions {
	/** Rows of the logical embedding and output layer; default: as many as tokens. */
	readonly paddedVocabularySize?: number;
}

export interface Family {
	/** model_type in config.json. */
	readonly modelType: string;
	/** Its name in messages. */
	readonly title: string;
	/** The embedding's name behind Spelling.base. */
	readonly embedding: string;
	/** Layers of this program's pattern that one of the family's is. */
	readonly blocks: number;
	/** Reads a config.json. `path`: for errors; throws a UserError that names the field of a model that is not of this program. */
	readonly read: (json: Json, path: string) => LanguageModelConfiguration;
	/** Fields that a config.json leaves to transformers' defaults. */
	readonly missing: (json: Json) => ReadonlySet<string>;
	/** Whether the family has models of this kind; `write` then refuses what it cannot say. */
	readonly describes: (configuration: LanguageModelConfiguration) => boolean;
	/** A config.json. `dtype`: torch's name of the weights' type. */
	readonly write: (configuration: LanguageModelConfiguration, dtype: string, path: string) => Record<string, unknown>;
	/** The spelling of a folder's tensor names; null: they are of another family. */
	readonly detect: (names: Iterable<string>) => Spelling | null;
	/** The spelling of a model that comes from no folder. */
	readonly spelling: Spelling;
	/** Layers of multi-token prediction; absent: the family has none, or config.json alone says them. */
	readonly ahead?: Ahead;
	/** Compares the layers and experts of a config.json with the tensors that are there, before names are made from them. */
	readonly requireCounts: (
		configuration: LanguageModelConfiguration,
		spelling: Spelling,
		stored: Shapes,
		path: string,
	) => void;
	/** Adds the model's tensors, of both formats, to those of other modules. */
	readonly addNames: (
		builder: CorrespondenceBuilder,
		configuration: LanguageModelConfiguration,
		spelling: Spelling,
		options: NameOptions,
	) => void;
}

/** Layers of multi-token prediction. Their number is that of a folder's tensors, which may differ from the number in config.json. */
export interface Ahead {
	/** The field that counts them. */
	readonly field: string;
	/** The depth that a tensor is of, counted from 0; null: it is of the main part. */
	readonly depthOf: (json: Json) => (name: string) => number | null;
}

/** Where the tensors of a layer go. */
export interface LayerNames {
	readonly builder: CorrespondenceBuilder;
	readonly c: LanguageModelConfiguration;
	readonly logical: string;
	readonly foreign: string;
}

/** Throws a UserError about a config.json. */
export type Refuse = (sentence: string) => never;

export function refusalAt(path: string): Refuse {
	return (sentence) => {
		throw new UserError(`${path}: ${sentence}.`);
	};
}

/** A number of a config.json from 0. */
export function fraction(values: Json, name: string, missing: number, bad: Refuse): number {
	const value = values[name] ?? missing;
	if (typeof value === "number" && Number.isFinite(value) && value >= 0) return value;
	return bad(`${name} is ${JSON.stringify(value)}, expected a number`);
}

/** A whole number of a config.json from 1. */
export function whole(values: Json, name: string, missing: number, bad: Refuse): number {
	const value = values[name] ?? missing;
	if (Number.isSafeInteger(value) && (value as number) > 0) return value as number;
	return bad(`${name} is ${JSON.stringify(value)}, expected a whole number from 1`);
}

/** A whole number of a config.json from 0. */
export function count(values: Json, name: string, missing: number, bad: Refuse): number {
	const value = values[name] ?? missing;
	return value === 0 ? 0 : whole({ [name]: value }, name, missing, bad);
}

/** The config.json that was made of a model, which describes the same model to every reader; otherwise throws a UserError. */
export function readAlike(
	written: Record<string, unknown>,
	configuration: LanguageModelConfiguration,
	path: string,
	{ title, read }: { readonly title: string; readonly read: Family["read"] },
): Record<string, unknown> {
	const again = read(parsePythonJson(formatPythonJson(written), path), path);
	const differences = modelDifferences({ ...again }, { ...configuration });
	if (differences.length === 0) return written;
	throw new UserError(`${path}: Hugging Face's ${title} is another model: ${differences.join("; ")}.`);
}

/** A tensor with a row a token, which the logical one may have more of. */
export function addVocabulary(
	builder: CorrespondenceBuilder,
	{ vocabSize: rows, hiddenSize: width }: LanguageModelConfiguration,
	{ paddedVocabularySize: padded = rows }: NameOptions,
	names: { readonly logical: string; readonly foreign: string },
): void {
	builder.addLogical(names.logical, [padded, width]);
	builder.addForeign(names.foreign, [rows, width]);
	builder.rows({ ...names, width, rows });
	if (padded > rows) builder.padded.add(names.logical);
}

/**
 * Rows of linear_qkv: per group its query heads, their gates if they have any, then one key head, one value head
 * (docs/spec/checkpoint.md §4.2). q_proj has a query head and its gate in turn.
 */
export function addQueryKeyValue(
	builder: CorrespondenceBuilder,
	c: LanguageModelConfiguration,
	end: "weight" | "bias",
	modules: { readonly logical: string; readonly foreign: string },
): void {
	const { hiddenSize, numAttentionHeads: heads, numQueryGroups: groups, kvChannels: d } = c;
	const gated = c.attentionOutputGate === true;
	const ofGroup = heads / groups;
	const queryRows = (gated ? 2 : 1) * ofGroup * d;
	const groupRows = queryRows + 2 * d;
	const width = end === "bias" ? 1 : hiddenSize;
	const shape = (rows: number) => (end === "bias" ? [rows] : [rows, width]);
	const logical = `${modules.logical}linear_qkv.${end}`;
	builder.addLogical(logical, shape(groups * groupRows));
	for (const [part, rows, logicalRow] of [
		["q", queryRows, 0],
		["k", d, queryRows],
		["v", d, queryRows + d],
	] as const) {
		const foreign = `${modules.foreign}${part}_proj.${end}`;
		builder.addForeign(foreign, shape(groups * rows));
		const place = { logical, foreign, width, count: groups, logicalStride: groupRows };
		if (part !== "q" || !gated) {
			builder.rows({ ...place, rows, logicalRow });
			continue;
		}
		for (let row = 0; row < 2 * ofGroup; row++) {
			const foreignRow = (row < ofGroup ? 2 * row : 2 * (row - ofGroup) + 1) * d;
			builder.rows({ ...place, rows: d, logicalRow: row * d, foreignRow, foreignStride: rows });
		}
	}
}
