/** A family of language models in Hugging Face's format: how its config.json and its tensors say a model of this program. */
import type { CorrespondenceBuilder } from "../../mapping.ts";
import type { LanguageModelConfiguration } from "../configuration.ts";

/** The tensor names of a Hugging Face folder. */
export interface Spelling {
	/** model_type of the family; absent: nemotron_h. */
	readonly family?: string;
	/** In front of the layers and the embedding. */
	readonly base: string;
	/** In front of lm_head.weight. */
	readonly head: string;
	/** separate: a tensor for each expert (published checkpoints); packed: all experts of a layer stacked (transformers). */
	readonly experts: "separate" | "packed";
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
