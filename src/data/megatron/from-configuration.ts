/** The splits of indexed data that a configuration names, with as many samples as its run takes. */
import { plannedIterations } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";
import { configuredTokenizer, nameOfTokenizer } from "../text/configured-tokenizer.ts";
import type { TokenSource } from "../text/token-source.ts";
import {
	type Blend,
	IndexedFiles,
	parseBlend,
	type Split,
	type SplitOptions,
	splitBounds,
	splits,
	splitWords,
	wordsOf,
} from "./splits.ts";

/** A split's blend, and the part of its files; null: the split has no data. */
type Place = { readonly blend: Blend } & Pick<SplitOptions, "bounds" | "ownBlend">;

export interface IndexedText extends Disposable {
	/** Token that ends a document; null: the run does not tell documents apart. */
	readonly endId: number | null;
	readonly training: TokenSource;
	/** null: nothing is held out, or no evaluation is configured. */
	readonly validation: TokenSource | null;
	readonly test: TokenSource | null;
}

/** Bytes of the largest file with arguments. */
const LARGEST_ARGUMENTS = 2 ** 26;

/** Opens the data and orders their samples. `epoch`: one pass of each split, however many samples the run takes. */
export function openIndexedText(c: TrainingConfiguration, { epoch = false } = {}): IndexedText {
	const places = placesOf(c);
	const training = places.train;
	if (training === null) throw new UserError("The indexed data have no part for training: see split.");
	const files = new IndexedFiles({
		sequenceLength: c.seqLength,
		vocabularySize: c.vocabSize,
		seed: c.seed,
		surplus: c.midLevelDatasetSurplus,
	});
	const wanted: Readonly<Record<Split, number>> = samplesOf(c);
	const open = (split: Split, place: Place, whole: boolean) =>
		files.split(place.blend, { ...place, samples: whole ? null : wanted[split], name: split });
	const held = (split: Split, whole: boolean) => {
		const place = places[split];
		return place === null || c.evalIters === 0 ? null : open(split, place, whole);
	};
	try {
		return {
			endId: endOfDocument(c),
			training: open("train", training, epoch),
			validation: held("valid", c.fullValidation),
			test: held("test", false),
			[Symbol.dispose]: () => files[Symbol.dispose](),
		};
	} catch (error) {
		files[Symbol.dispose]();
		throw error;
	}
}

/** The token by which a run tells documents apart, if it does. Throws a UserError where nothing names it. */
function endOfDocument(c: TrainingConfiguration): number | null {
	if (!c.eodMaskLoss && !c.resetAttentionMask) return null;
	const end = c.dataEndId ?? configuredTokenizer(c).endOfDocument;
	if (end !== null) return end;
	const key = c.eodMaskLoss ? "eod-mask-loss" : "reset-attention-mask";
	throw new UserError(
		`${key}: neither data-end-id nor the tokenizer ${nameOfTokenizer(c)} names the end of documents.`,
	);
}

/** Samples that a run takes of every split (get_train_valid_test_num_samples in megatron/training/training.py). */
function samplesOf(c: TrainingConfiguration): Record<Split, number> {
	const iterations = plannedIterations(c);
	const evaluations = Math.floor(iterations / c.evalInterval) + 1;
	const each = c.evalIters * c.evalGlobalBatchSize;
	return { train: c.trainSamples ?? iterations * c.globalBatchSize, valid: evaluations * each, test: each };
}

/** Which of the keys for data are given, and what they name (get_blend_and_blend_per_split in megatron/training/utils.py). */
function placesOf(c: TrainingConfiguration): Readonly<Record<Split, Place | null>> {
	if (c.perSplitDataArgsPath !== null) {
		const own = splitWords(readWholeText(c.perSplitDataArgsPath, LARGEST_ARGUMENTS), c.perSplitDataArgsPath);
		return bySplit((split) => ownPlace(own[split], `${split} in ${c.perSplitDataArgsPath}`));
	}
	const held = c.validDataPath ?? c.testDataPath;
	if (c.dataArgsPath === null && (c.trainDataPath ?? held) !== null) {
		// With other data held out, all of data-path trains.
		const given = { train: c.trainDataPath ?? c.dataPath, valid: c.validDataPath, test: c.testDataPath };
		return bySplit((split) => ownPlace(given[split] === null ? [] : wordsOf(given[split]), `${split}-data-path`));
	}
	const words =
		c.dataArgsPath === null ? wordsOf(c.dataPath!) : wordsOf(readWholeText(c.dataArgsPath, LARGEST_ARGUMENTS));
	const blend = parseBlend(words, c.dataArgsPath ?? "data-path");
	const bounds = splitBounds(c.split);
	return bySplit((_, i) => (bounds[i] === null ? null : { blend, bounds: bounds[i]!, ownBlend: false }));
}

function bySplit(place: (split: Split, index: number) => Place | null): Record<Split, Place | null> {
	return Object.fromEntries(splits.map((split, i) => [split, place(split, i)])) as Record<Split, Place | null>;
}

function ownPlace(words: readonly string[], name: string): Place | null {
	return words.length === 0 ? null : { blend: parseBlend(words, name), bounds: [0, 1], ownBlend: true };
}
