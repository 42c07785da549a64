/**
 * One rank of a run with all others simulated: its part of the model, its optimizer, and the microbatches of mock data that
 * it would train on. The code that trains builds and runs it, so that the counts are those of a run.
 */
import { dataLanes, encoderMicroBatchSize, encoderTurns } from "../config/derive.ts";
import { type ModuleConfiguration, modulesOf } from "../config/modules.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { type ImageSet, noImages } from "../data/images.ts";
import { type ImageTextMicrobatch, noText } from "../data/microbatch.ts";
import {
	fullestSample,
	MockData,
	type MockSample,
	mockImage,
	mockImages,
	picturesOf,
	placeholdersOf,
} from "../data/mock.ts";
import { patchWidth } from "../models/vit/config.ts";
import type { Device } from "../native/device.ts";
import { topologyOf, visionModule, World } from "../parallel/index.ts";
import { type Action, type Chunk, isWork, type Work } from "../schedule/actions.ts";
import { encoderKinds } from "../train/encoder-kinds.ts";
import { openRun } from "../train/from-configuration.ts";
import type { RankPasses } from "../train/rank-passes.ts";
import { keptBytes } from "../train/restart/kept-state.ts";
import { trainStep } from "../train/step.ts";
import type { TrainingState } from "../train/step-state.ts";
import { SimulatedGroup, type Transfer } from "./simulated-group.ts";

/**
 * Parts of a step in order. Reduce: sums over replicas, scaling, the norm's squares, until all ranks agree on the norm.
 * Update: the rest of the step.
 */
export type Phase = "prepare" | Work["kind"] | "reduce" | "update";

export interface RankRun extends Disposable {
	/** Names of the rank's modules, such as "language", and of its pipeline stage where there are several. */
	readonly module: string;
	/** Whether the language model is among them. */
	readonly language: boolean;
	readonly passes: RankPasses;
	/** Bytes of a copy of the rank's training state for a restart. */
	readonly keptBytes: number;
	/** Draws the model's initial values: for a run on a real device. */
	initialise(): void;
	/** Trains one step on `microbatches` of this rank's: of mock samples, or of the packs that need most memory. Default: usual. */
	step(microbatches: number, samples?: "usual" | "fullest"): void;
}

export interface RankObserver {
	/** `chunk`: the one whose work a forward, backward or weight gradient phase is. */
	readonly phase: (phase: Phase, chunk: Chunk | null) => void;
	readonly transfer: (transfer: Transfer) => void;
	/** Rows that other ranks' routers send to this one's experts, over those of an even routing. */
	readonly imbalance: number;
}

/** Microbatches of a step of one lane. */
export function microbatchesOf(c: TrainingConfiguration): number {
	return c.globalBatchSize / (c.microBatchSize * dataLanes(c));
}

/** The rank of a run whose other ranks are simulated. */
export async function openRank(
	c: TrainingConfiguration,
	device: Device,
	rank: number,
	observer: RankObserver,
): Promise<RankRun> {
	const topology = topologyOf(c);
	const { grid, tokens } = mockImage(c);
	const usual: MockSample = { grids: [grid], tokens };
	const fullest = fullestSample(c) ?? usual;
	/** The sample of the step that runs, which all other ranks have too. */
	let sample = usual;
	const modules = modulesOf(c);
	/** Rows of a sample of the encoders of `modules`, by the group of their edge. */
	const rows = new Map(modules.map(({ name, frames }) => [`edge.${name}.forward`, frames]));
	const simulation = {
		observe: observer.transfer,
		integers: (group: string, length: number) => new Int32Array(length).fill(rows.get(group) ?? sample.tokens),
		imbalance: observer.imbalance,
	};
	const world = World.simulated(
		device,
		rank,
		topology.worldSize,
		(name, ranks) => new SimulatedGroup(name, ranks, rank, simulation),
	);
	// Simulated lanes have this lane's images, so balancing would move none. Debug lines are for the run that is planned.
	const run = await openRun({ ...c, encoderBalance: "number", mimoEncoderPrefetchDebug: false }, world);
	// Made once: a real run loads its data while it trains.
	const made = new Map<MockSample, ImageTextMicrobatch[]>();
	const batches = (count: number) => {
		const all = made.get(sample) ?? [];
		made.set(sample, all);
		// Only sizes are counted: every microbatch has the same tokens.
		const text = all[0]?.text ?? (run.language ? mockTexts(c, sample).microbatch(0, c.microBatchSize) : noText);
		for (let index = all.length; index < count; index++) {
			// The rank's first microbatch is its turn.
			const images = index % encoderTurns(c) === 0 ? imageSet(c, sample, device) : noImages(0);
			const others = modules
				.filter(({ name }) => run.encoders.some((encoder) => encoder.name === name))
				.map((module) => [module.name, moduleSet(c, module, device)] as const);
			all.push({
				text,
				features: { ...(run.encoder && { [visionModule]: images }), ...Object.fromEntries(others) },
			});
		}
		return all.slice(0, count);
	};
	const own = topology.gridOf(rank);
	const stage = own.shape.pipeline > 1 ? ` stage ${own.coordinates(rank).pp}` : "";
	return {
		module: topology.moduleOf(rank) + stage,
		language: run.language !== null,
		passes: run.state.passes,
		keptBytes: run.state.optimizer.shards.reduce((sum, shard) => sum + keptBytes(shard), 0),
		initialise: () => {
			run.initialise(c.seed);
			run.state.optimizer.refreshMasters();
		},
		step: (count, samples = "usual") => {
			sample = samples === "fullest" ? fullest : usual;
			step(c, run.state, batches(count), observer);
		},
		[Symbol.dispose]: () => run[Symbol.dispose](),
	};
}

/** As many samples as a lane trains on in a step. */
function mockTexts(c: TrainingConfiguration, { grids, tokens }: MockSample): MockData {
	return new MockData({
		seed: c.seed,
		size: microbatchesOf(c) * c.microBatchSize,
		sequenceLength: c.seqLength,
		vocabularySize: c.vocabSize,
		imageTokenId: c.imageTokenId,
		imageTokens: tokens,
		pictures: picturesOf(c, grids),
		placeholders: placeholdersOf(c),
	});
}

/** An encoder may serve hundreds of lanes: where values are not needed no pixels are made. */
function imageSet(c: TrainingConfiguration, { grids }: MockSample, { counts }: Device): ImageSet {
	return mockImages(
		encoderMicroBatchSize(c),
		grids,
		counts ? 0 : patchWidth({ patchSize: c.patchDim, temporalPatch: 1 }),
	);
}

/** As imageSet, of an encoder of `modules`. */
function moduleSet(c: TrainingConfiguration, module: ModuleConfiguration, { counts }: Device): ImageSet {
	const grid = encoderKinds[module.kind].grid(module);
	const samples = (c.microBatchSize * dataLanes(c)) / module.dp;
	return mockImages(samples, [grid], counts ? 0 : module.frameWidth);
}

/** Runs a step and reports its phases. */
function step(
	c: TrainingConfiguration,
	state: TrainingState,
	microbatches: readonly ImageTextMicrobatch[],
	observer: RankObserver,
): void {
	const scheduled = { learningRate: c.lr, weightDecay: c.weightDecay };
	observer.phase("prepare", null);
	let waits = 0;
	trainStep(
		state,
		{ microbatches, iteration: 0, ...scheduled },
		{
			action: (action) => observer.phase(...phaseOf(action)),
			// All ranks wait for each other twice: for the loss tokens, and for the gradient's norm.
			part: (part) => {
				if (part === "wait") observer.phase(waits++ === 0 ? "reduce" : "update", null);
			},
		},
	);
}

/** The phase of an action, and its chunk for work. Rows on an edge belong to the forward pass, gradients to the backward pass. */
function phaseOf(action: Action): [Phase, Chunk | null] {
	if (action.kind === "reduce") return ["reduce", null];
	return isWork(action) ? [action.kind, action.chunk] : [action.direction, null];
}
