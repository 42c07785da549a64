/**
 * NemotronH weights in a Hugging Face folder under Megatron's logical names: load and save (checkpoint.md §4,
 * language-model.md §10). Strict: every missing, unexpected and mis-shaped tensor is named.
 */
import { join } from "node:path";
import { UserError } from "../../native/errors.ts";
import { writeFileAtomically } from "../files.ts";
import { writeFolderAtomically } from "../folders.ts";
import { MappedStore, planTensors } from "../mapping.ts";
import { readPieces, selectTensors, type TensorStore } from "../store.ts";
import {
	configurationFromHuggingFace,
	configurationToHuggingFace,
	type LanguageModelConfiguration,
} from "./configuration.ts";
import { HuggingFaceFolder, writeHuggingFaceFiles } from "./folder.ts";
import { formatPythonJson, parsePythonJson } from "./json.ts";
import { detectSpelling, languageCorrespondence, requireCounts, type Spelling } from "./language-names.ts";
import { ownershipFile, ownershipText } from "./ownership.ts";

export interface HuggingFaceModel extends Disposable {
	readonly configuration: LanguageModelConfiguration;
	readonly spelling: Spelling;
	/** config.json as it stands in the folder. */
	readonly configText: string;
	/** Tensors under logical names; reads one at a time from the folder. */
	readonly weights: TensorStore;
}

export interface LogicalNames {
	/** In front of every logical name; "language_model." if not given. */
	readonly prefix?: string;
	/** Rows of the logical embedding and output layer; the rows past the vocabulary are zero. */
	readonly paddedVocabularySize?: number;
}

/** Opens a folder and checks names and shapes; no weights are read yet. */
export function openHuggingFaceModel(path: string, options: LogicalNames = {}): HuggingFaceModel {
	const folder = HuggingFaceFolder.open(path);
	try {
		const configuration = configurationFromHuggingFace(
			parsePythonJson(folder.configText, folder.configPath),
			folder.configPath,
		);
		const spelling = detectSpelling(folder.tensors.keys());
		if (!spelling) {
			throw new UserError(`${path} has neither backbone.embeddings.weight nor model.embeddings.weight.`);
		}
		const store = configuration.untieEmbeddingsAndOutputWeights ? folder : withoutTiedHead(folder, spelling);
		requireCounts(configuration, spelling, folder.tensors, folder.configPath);
		const correspondence = languageCorrespondence(configuration, spelling, folder.configPath, options);
		const plan = planTensors(store, correspondence, "logical");
		const weights = new MappedStore(store, plan);
		return {
			configuration,
			spelling,
			configText: folder.configText,
			weights,
			[Symbol.dispose]: () => weights[Symbol.dispose](),
		};
	} catch (error) {
		folder[Symbol.dispose]();
		throw error;
	}
}

/** A tied model's lm_head may be stored all the same; then it must be the embedding. */
export function withoutTiedHead(folder: TensorStore, spelling: Spelling): TensorStore {
	const [head, embedding] = [`${spelling.head}lm_head.weight`, `${spelling.base}embeddings.weight`];
	if (!folder.tensors.has(head)) return folder;
	const other = readPieces(folder, embedding);
	for (const piece of readPieces(folder, head)) {
		if (Buffer.compare(piece, other.next().value ?? new Uint8Array(0)) !== 0) {
			throw new UserError(`${folder.path}: tie_word_embeddings is true, but ${head} differs from ${embedding}.`);
		}
	}
	return selectTensors(folder, (name) => name !== head);
}

/** Names of torch's dtypes in config.json. */
const torchNames: Readonly<Record<string, string>> = { F32: "float32", BF16: "bfloat16", F16: "float16" };

/**
 * Writes logical weights as a Hugging Face folder. `configText` is used verbatim when given (a model that came from
 * there keeps its config.json), otherwise one is made.
 */
export async function saveHuggingFaceModel(
	path: string,
	weights: TensorStore,
	configuration: LanguageModelConfiguration,
	options: LogicalNames & {
		readonly spelling: Spelling;
		readonly configText?: string;
		readonly shardBytes?: number;
		readonly replace?: boolean;
		/** Name of the training that writes it. */
		readonly lineage?: string;
		readonly onBytes?: (bytes: number) => void;
	},
): Promise<void> {
	const correspondence = languageCorrespondence(configuration, options.spelling, path, options);
	const mapped = new MappedStore(weights, planTensors(weights, correspondence, "foreign"));
	const embedding = mapped.tensors.get(`${options.spelling.base}embeddings.weight`)!;
	const dtype = torchNames[embedding.dtype] ?? "float32";
	const configText = options.configText ?? formatPythonJson(configurationToHuggingFace(configuration, dtype, path));
	await writeFolderAtomically(path, options, (folder) => {
		writeHuggingFaceFiles(folder, mapped, { ...options, configText });
		const { lineage } = options;
		if (lineage === undefined) return;
		const text = new TextEncoder().encode(ownershipText(lineage));
		writeFileAtomically(join(folder, ownershipFile), (file) => file.write(text));
	});
}
