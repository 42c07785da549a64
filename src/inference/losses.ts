/** The model's loss on data sets: text files, rows of tokens, Energon data, and each entry of a metadataset on its own. */
import { energonChecks } from "../config/checks/data.ts";
import { derivations } from "../config/derive.ts";
import { propertyOf, type TrainingConfiguration } from "../config/schema.ts";
import { openStorage } from "../data/energon/storage/open.ts";
import { describeDataset } from "../data/energon/tools/describe.ts";
import { type ImageTextMicrobatch, sampleLengths } from "../data/microbatch.ts";
import { storageOf, timeoutOf } from "../data/routing/from-configuration.ts";
import { SkippedTally } from "../data/skipped-samples.ts";
import type { Evaluation } from "../guests/guest.ts";
import { ReadGuard } from "../native/files.ts";
import type { World } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import type { Run } from "../train/assemble.ts";
import { evaluate } from "../train/evaluate.ts";
import { dataPlaceOf, readersWith } from "../train/feed/batch-source.ts";
import { energonSamplesOnce } from "../train/feed/energon-source.ts";
import { laneOf } from "../train/feed/shared-batches.ts";
import { openSources } from "../train/feed/sources.ts";
import { languageModelLoss } from "../train/losses.ts";
import { SkippedReport } from "../train/report/skipped-samples.ts";

export interface DatasetLoss {
	readonly dataset: string;
	/** Part of an Energon data set; null: all of a file. */
	readonly part: string | null;
	/** Samples whose tokens count, each once: sequences of a text. */
	readonly samples: number;
	/** Tokens that count, and the mean of their losses. */
	readonly tokens: number;
	/** Of the model as it is, or of the one budget that is asked for. */
	readonly loss: number;
	/** Of an elastic model at every budget, without noise. */
	readonly budgets: readonly { readonly budget: number; readonly loss: number }[];
}

/** A data set by itself. */
export interface Entry {
	readonly path: string;
	/** null: not Energon data. */
	readonly part: string | null;
	/** Samples of Energon data; null: those of the file. */
	readonly samples: number | null;
}

/** The conditions of Energon data, which a configuration without data-path is not asked for. Throws a UserError. */
function requireReadable(c: TrainingConfiguration, path: string): void {
	const own = { ...c, dataPath: path, datasetProvider: "energon" as const };
	for (const check of energonChecks) {
		const complaint = check(own);
		if (complaint === null) continue;
		const { key, message } = complaint;
		throw new UserError(
			`To read ${path}, --${key} ${JSON.stringify(own[propertyOf(key)])}: ${message}.`,
			exitCodes.usage,
		);
	}
}

/**
 * The data sets behind paths. A metadataset's entries come one by one, but all together where one of them is a join or a
 * subset, which no path names. Throws a UserError for what cannot be read.
 */
export function entriesOf(c: TrainingConfiguration, paths: readonly string[]): Entry[] {
	using _ = new ReadGuard(timeoutOf(c));
	return paths.flatMap((path): Entry[] => {
		if (derivations["dataset-provider"]({ ...c, dataPath: path }) !== "energon") {
			return [{ path, part: null, samples: null }];
		}
		requireReadable(c, path);
		const storage = openStorage(storageOf(c));
		const { kind, samples, parts, leaves } = describeDataset(storage, path);
		const wanted = c.validDataSplitPart;
		if (kind === "jsonl") return [{ path, part: wanted, samples }];
		const filled = parts.filter(({ shards }) => shards > 0);
		const known = (kind === "metadataset" ? leaves : filled).map(({ part }) => part);
		if (!known.includes(wanted)) {
			throw new UserError(
				`${path} has no part ${wanted}: --valid-data-split-part takes one of ${[...new Set(known)].join(", ")}.`,
			);
		}
		if (kind === "webdataset") {
			const found = parts.find(({ part }) => part === wanted)!;
			return [{ path, part: wanted, samples: found.samples - found.excluded }];
		}
		const own = leaves.filter(({ part }) => part === wanted);
		const whole = own.some((leaf) => leaf.used !== leaf.samples || leaf.path.startsWith("join in "));
		if (whole) return [{ path, part: wanted, samples: own.reduce((sum, { used }) => sum + used, 0) }];
		const named = new Map(own.map((leaf) => [`${leaf.path}\n${leaf.splitPart}`, leaf]));
		return [...named.values()].map((leaf) => ({ path: leaf.path, part: leaf.splitPart, samples: leaf.used }));
	});
}

/**
 * The first `most` samples of every entry, cut for this rank; `tally` counts those that this rank tells of. Every rank of
 * the world calls this together.
 */
export async function* samplesOf(
	c: TrainingConfiguration,
	run: Run,
	world: World,
	entries: readonly Entry[],
	most: number,
	tally: SkippedTally,
): AsyncGenerator<{ readonly entry: Entry; readonly microbatches: readonly ImageTextMicrobatch[] }> {
	const place = dataPlaceOf(run.topology, run.rank);
	const { laneCount } = place;
	const options = {
		world: run.state.world,
		lane: laneOf(await world.group("readers", readersWith(run.topology, run.rank)), world.device),
		states: null,
		consumedValidSamples: 0,
	};
	for (const entry of entries) {
		const { path, part, samples } = entry;
		const own = { ...c, dataPath: path, validDataPath: path };
		let read: readonly ImageTextMicrobatch[];
		if (part === null) {
			const size = c.evalMicroBatchSize * laneCount;
			const rounds = Math.max(1, Math.floor(most / size));
			const provider = derivations["dataset-provider"](own) as TrainingConfiguration["datasetProvider"];
			const all = { ...own, datasetProvider: provider, evalGlobalBatchSize: size, evalIters: 1, fullValidation: true };
			read = await (await openSources(all, place, options)).validation!.microbatches(rounds);
		} else {
			if (samples! < laneCount) {
				throw new UserError(
					`${path} has ${counted(samples!, "sample")}, fewer than the ${counted(laneCount, "data lane")}.`,
				);
			}
			const rounds =
				most < samples! ? Math.max(1, Math.floor(most / laneCount)) : roundsOfAll(samples!, laneCount, c.numWorkers);
			const all = { ...own, datasetProvider: "energon" as const, validDataSplitPart: part };
			read = await energonSamplesOnce(all, place, options, tally, rounds);
		}
		const counting = read.findLastIndex((microbatch) => countedSamples(microbatch) > 0) + 1;
		const used = Math.max(...run.state.world.exchange(Int32Array.of(counting)).map(([count]) => count!));
		yield { entry, microbatches: read.slice(0, used) };
	}
}

/**
 * Rounds of a sample of every lane after which each sample was read: of workers, which share the samples equally and take
 * turns, some have one more than others, and begin anew when they have read theirs.
 */
function roundsOfAll(samples: number, lanes: number, workersOfLane: number): number {
	const workers = Math.max(1, workersOfLane);
	return workers * Math.ceil(samples / (lanes * workers));
}

/** Number of samples with at least one token that counts in the loss. */
function countedSamples({ text }: ImageTextMicrobatch): number {
	let begin = 0;
	return sampleLengths(text).filter((length) => {
		const mask = text.lossMask.subarray(begin, begin + length);
		begin += length;
		return mask.some((value) => value > 0);
	}).length;
}

/**
 * Losses of the first `most` samples of every entry, and a sentence for each kind of samples left out. Every rank of the
 * world calls this together.
 */
export async function lossesOf(
	c: TrainingConfiguration,
	run: Run,
	world: World,
	entries: readonly Entry[],
	most: number,
): Promise<{ readonly losses: DatasetLoss[]; readonly skipped: readonly string[] }> {
	const found: DatasetLoss[] = [];
	const tally = new SkippedTally();
	const { whole, parts } = run.evaluations;
	for await (const { entry, microbatches } of samplesOf(c, run, world, entries, most, tally)) {
		const of = (model: Evaluation | null) => evaluate(run.state, microbatches, undefined, model);
		const each = parts.map((budget) => ({ budget: budget.value, ...of(budget) }));
		const { losses, tokens } = whole ? of(null) : each[0]!;
		const own = microbatches.reduce((sum, microbatch) => sum + countedSamples(microbatch), 0);
		const counted = Int32Array.of(run.state.lossOwner?.counts ? own : 0);
		const everyone = run.state.world.exchange(counted).reduce((sum, [count]) => sum + count!, 0);
		const { path, part } = entry;
		const byBudget = each.map((one) => ({ budget: one.budget, loss: one.losses[languageModelLoss]! }));
		found.push({ dataset: path, part, samples: everyone, tokens, loss: losses[languageModelLoss]!, budgets: byBudget });
	}
	return { losses: found, skipped: new SkippedReport(run.state.world, tally).rest() };
}
