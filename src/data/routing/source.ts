/**
/**
 * Microbatches of a rank out of Energon data (docs/spec/energon.md §7). Every rank reads the lanes it needs, each lane
 * as the loader of that data rank: a language rank its own, an encoder rank those it serves. All ranks that read a lane
 * read the same samples, because the order depends on the lane alone.
 */
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import type { LoaderConfiguration, TaskConfiguration } from "../energon/loader/configuration.ts";
import { DataLoader, defaultLoaderOptions, type LoaderOptions } from "../energon/loader/loader.ts";
import { SkipLog } from "../energon/loader/skipped.ts";
import { decodeState, encodeState, type LoaderState } from "../energon/loader/state.ts";
import type { SkippedSample } from "../energon/loader/thread.ts";
import type { ImageTextBatch } from "../vision-language/batch.ts";
import {
	compareReports,
	type Damage,
	encodeReports,
	exchangeDamage,
	mostDamaged,
	nothingRead,
	Trail,
} from "./agreement.ts";
import { isTurn, type Share, wholeShare } from "./image-share.ts";

/** Gives every rank's integers, as many of each; all ranks call it together. */
type Exchange = (values: Int32Array) => Int32Array[];

/** lane: a loader for each lane. routed: one loader whose workers make the outputs of all of them. */
export type Routing = "lane" | "routed";

export interface SourceOptions {
	/** Configuration of the whole data set; its rank is not used, its world size is the number of lanes. */
	readonly configuration: LoaderConfiguration;
	/** Lanes that this rank reads as the configuration's task says, ascending. */
	readonly lanes: readonly number[];
	/** Further lanes whose text alone this rank reads. */
	readonly textLanes?: readonly number[];
	/** This rank's turns where encoder lanes take whole microbatches; absent: every microbatch is its turn. */
	readonly turn?: Share;
	readonly routing: Routing;
	readonly loader: Partial<LoaderOptions>;
	/** Where damaged samples are listed; set on one of the ranks that decode them. */
	readonly damage?: { readonly file: string | null; readonly report: (skipped: SkippedSample) => void };
	/** Of all lanes of the saved run; null = from the beginning. */
	readonly state: SourceState | null;
}

/** Positions of the lanes as plain JSON: loader states as base64 of their compressed form. */
export interface SourceState {
	readonly format: "mimo data source";
	readonly version: 1;
	readonly lanes: readonly LaneState[];
}

export interface LaneState {
	readonly lane: number;
	readonly loader: string;
	/** Running hash of the samples given. */
	readonly trail: string;
}

interface Feed {
	readonly lane: number;
	readonly loader: DataLoader;
	readonly place: number;
	readonly trail: Trail;
	/** Images and microbatches since the last comparison, and what of those is damaged. */
	images: number;
	microbatches: number;
	damaged: Damage[];
}

const [format, version] = ["mimo data source", 1] as const;

export class EnergonSource implements AsyncDisposable {
	private constructor(
		private readonly loaders: readonly DataLoader[],
		private readonly feeds: readonly Feed[],
		/** Lanes of the run. */
		readonly laneCount: number,
		options: SourceOptions,
	) {
		this.#turn = options.turn ?? wholeShare;
		this.#onDamage = damageOf(options);
	}

	readonly #turn: Share;
	readonly #onDamage: (batch: ImageTextBatch, lane: number) => void;

	/** Opens the data set. Throws a UserError for anything wrong with it or with the state. */
	static async open(options: SourceOptions): Promise<EnergonSource> {
		const { configuration, lanes, textLanes = [], routing, loader, state } = options;
		const { worldSize, numWorkers } = configuration;
		const saved = state && statesOf(state, worldSize, numWorkers);
		const textAlone = { ...configuration, task: { ...configuration.task, keep: "text" } as TaskConfiguration };
		const groups = [
			...groupsOf(lanes, routing).map((ranks) => ({ ranks, configuration })),
			...groupsOf(textLanes, routing).map((ranks) => ({ ranks, configuration: textAlone })),
		];
		const memoryBytes = loader.memoryBytes && Math.ceil(loader.memoryBytes / groups.length);
		const loaders: DataLoader[] = [];
		try {
			for (const { ranks, configuration } of groups) {
				const states = saved && { states: ranks.map((rank) => saved.loaders[rank]!) };
				const own = { ...loader, ...(memoryBytes ? { memoryBytes } : {}), ranks, ...states };
				loaders.push(await DataLoader.open({ ...configuration, rank: ranks[0]! }, own));
			}
		} catch (error) {
			for (const opened of loaders) await opened[Symbol.asyncDispose]();
			throw error;
		}
		const feeds = groups.flatMap(({ ranks }, group) =>
			ranks.map((lane, place): Feed => {
				const trail = new Trail(saved?.trails[lane]);
				return { lane, loader: loaders[group]!, place, trail, images: 0, microbatches: 0, damaged: [] };
			}),
		);
		return new EnergonSource(loaders, feeds, worldSize, options);
	}

	/** The next microbatch of every lane this rank reads, by lane. */
	async next(): Promise<Map<number, ImageTextBatch>> {
		const batches = new Map<number, ImageTextBatch>();
		for (const feed of this.feeds) {
			const batch = await take(feed);
			feed.trail.add(batch.names);
			feed.images += batch.imageCount;
			const { lane, microbatches: microbatch } = feed;
			// Where encoder lanes take turns, all of them decode the microbatch; the lane whose turn it is reports damage.
			if (isTurn(this.#turn, microbatch)) {
				this.#onDamage(batch, lane);
				feed.damaged.push(...batch.damaged.map(({ sample }) => ({ lane, microbatch, sample })));
			}
			feed.microbatches++;
			batches.set(lane, batch);
		}
		return batches;
	}

	/**
	 * Compares what all ranks have read: every rank calls it after the microbatches of a step, `exchange` gives everyone's
	 * integers. Returns the images of every lane since the last call, and the samples of any lane whose images are damaged;
	 * throws a UserError when lanes have drifted apart.
	 */
	compare(exchange: Exchange, iteration: number): { readonly images: number[]; readonly damaged: readonly Damage[] } {
		const reports = exchange(encodeReports(this.feeds, this.laneCount));
		const images = compareReports(reports, iteration);
		const own = this.feeds.flatMap((feed) => feed.damaged);
		const damaged = exchangeDamage(own, mostDamaged(reports), exchange);
		for (const feed of this.feeds) [feed.images, feed.microbatches, feed.damaged] = [0, 0, []];
		return { images, damaged };
	}

	/** The part in compare of a rank that reads nothing. */
	static compareNothing(exchange: Exchange, laneCount: number): void {
		exchangeDamage([], mostDamaged(exchange(nothingRead(laneCount))), exchange);
	}

	/** State of this rank's lanes after the last microbatch of next(). */
	async save(): Promise<SourceState> {
		const lanes = await Promise.all(
			this.feeds.map(async ({ lane, loader, place, trail }): Promise<LaneState> => {
				const bytes = encodeState(await loader.save(place));
				return { lane, loader: Buffer.from(bytes).toString("base64"), trail: trail.hash };
			}),
		);
		return { format, version, lanes };
	}

	/** Bytes of batches that this rank has received from its data threads. */
	get receivedBytes(): number {
		return this.loaders.reduce((sum, loader) => sum + loader.receivedBytes, 0);
	}

	async [Symbol.asyncDispose](): Promise<void> {
		for (const loader of this.loaders) await loader[Symbol.asyncDispose]();
	}
}

/** The lanes that each loader reads. */
function groupsOf(lanes: readonly number[], routing: Routing): (readonly number[])[] {
	if (lanes.length === 0) return [];
	return routing === "routed" ? [lanes] : lanes.map((lane) => [lane]);
}

/** Lists the damaged samples of a batch, or ends the run with the first. */
function damageOf({ loader, damage }: SourceOptions): (batch: ImageTextBatch, lane: number) => void {
	const { onFailure, skipBudget, onUnlisted } = { ...defaultLoaderOptions, ...loader };
	const log = new SkipLog(damage?.file ?? null, skipBudget, () => damage !== undefined, onUnlisted);
	return ({ damaged }, rank) => {
		for (const { reason, sources } of damaged) {
			if (onFailure === "raise") throw new UserError(reason);
			const skipped = { rank, worker: null, reason, expected: false, samples: sources };
			log.add(skipped);
			damage?.report(skipped);
		}
	};
}

/** A lane's next output; at the end of a pass that of the next one. */
async function take({ loader, place, lane }: Feed): Promise<ImageTextBatch> {
	for (let passes = 0; passes < 2; passes++) {
		const output = await loader.next(place);
		if (output !== null) return output.item as ImageTextBatch;
	}
	throw new UserError(`Data lane ${lane} has no whole batch: its samples are too few, or were excluded or left out.`);
}

/** The states that the ranks of a run saved, as one state: each lane once. null: no rank saved a state. */
export function mergeStates(states: readonly unknown[]): SourceState | null {
	const lanes = new Map<number, LaneState>();
	for (const state of states) {
		if (state === null || state === undefined) continue;
		for (const one of checkState(state).lanes) {
			const other = lanes.get(one.lane);
			if (other && other.trail !== one.trail) {
				throw new UserError(`The saved data states of lane ${one.lane} are of different samples.`);
			}
			lanes.set(one.lane, one);
		}
	}
	if (lanes.size === 0) return null;
	return { format, version, lanes: [...lanes.values()].sort((a, b) => a.lane - b.lane) };
}

function checkState(state: unknown): SourceState {
	const { format: name, version: found, lanes } = state as { format?: unknown; version?: unknown; lanes?: unknown };
	if (name !== format || !Array.isArray(lanes)) throw new UserError("The checkpoint's data state is of other data.");
	if (found !== version) {
		throw new UserError(`The data state has version ${String(found)}; this program reads version ${version}.`);
	}
	const whole = (lanes as Partial<LaneState>[]).every(
		(one) =>
			Number.isInteger(one?.lane) && typeof one.loader === "string" && /^[0-9a-f]{1,16}$/.test(one.trail as string),
	);
	if (!whole) throw new UserError("The checkpoint's data state is damaged: a lane cannot be read.");
	return state as SourceState;
}

/** Throws a UserError unless the saved states of all ranks are whole and go on exactly with these lanes and workers. */
export function requireFittingStates(states: readonly unknown[], lanes: number, numWorkers: number): void {
	const state = mergeStates(states);
	if (state !== null) statesOf(state, lanes, numWorkers);
}

/** Loader states and hashes of this run's lanes. Where their number changed, hashes begin anew. */
function statesOf(state: SourceState, lanes: number, numWorkers: number): { loaders: LoaderState[]; trails: string[] } {
	checkState(state);
	const decoded = state.lanes.map(({ loader }) => decodeState(Buffer.from(loader, "base64")));
	const loaders = resize(decoded, lanes, numWorkers);
	const same = state.lanes.length === lanes;
	const trails = loaders.map((_, lane) => (same ? state.lanes.find((one) => one.lane === lane)!.trail : "0"));
	return { loaders, trails };
}

// Continues a saved loader on another number of data ranks over the same logical workers (docs/spec/energon.md §4.3,
// §6): the workers of all ranks in order, split into equal runs.

/**
 * `states`: of all data ranks of the saved run, in any order. Returns those of `worldSize` ranks with `numWorkers` workers
 * each. Throws a UserError if the new run could not continue exactly.
 */
function resize(states: readonly LoaderState[], worldSize: number, numWorkers: number): LoaderState[] {
	const saved = [...states].sort((a, b) => a.rank - b.rank);
	const [first] = saved;
	if (first === undefined || saved.some(({ rank }, place) => rank !== place) || saved.length !== first.worldSize) {
		throw new UserError(
			`The saved data state has data ranks ${saved.map(({ rank }) => rank).join(", ") || "(none)"} of ${first?.worldSize ?? 0}; all are needed.`,
		);
	}
	if (first.worldSize === worldSize && first.numWorkers === numWorkers) return saved;
	const [before, now] = [first.worldSize * first.numWorkers, worldSize * numWorkers];
	if (before !== now || before === 0) {
		throw new UserError(
			`The data state was saved with ${counted(first.worldSize, "data rank")} of ${counted(first.numWorkers, "worker")}; a run of ${counted(worldSize, "data rank")} continues it exactly with ${fitting(before, worldSize)}.`,
		);
	}
	if (saved.some(({ nextWorker, ended }) => nextWorker !== 0 || ended.includes(true))) {
		throw new UserError(
			`The data state was saved in the middle of a round of the ${first.numWorkers} workers of a rank: continue with ${first.worldSize} data ranks, or from a checkpoint after a multiple of ${first.numWorkers} microbatches of a lane.`,
		);
	}
	const workers = saved.flatMap((state) => state.workers);
	return Array.from({ length: worldSize }, (_, rank) => ({
		settings: first.settings,
		rank,
		worldSize,
		numWorkers,
		nextWorker: 0,
		ended: new Array<boolean>(numWorkers).fill(false),
		workers: workers.slice(rank * numWorkers, (rank + 1) * numWorkers),
	}));
}

function fitting(workers: number, worldSize: number): string {
	if (workers > 0 && workers % worldSize === 0) return `num-workers ${workers / worldSize}`;
	return `no num-workers: use a number of data ranks that divides ${workers}`;
}
