/**
 * One rank of a run with all others imagined: its part of the model, its optimizer, and the microbatches of mock data that
 * it would train on. The code that trains builds and runs it, so that what is counted is what a run does.
 */
import { dataLanes, encoderMicroBatchSize } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { type ImageSet, noImages } from "../data/images.ts";
import { type Microbatch, noText } from "../data/microbatch.ts";
import { MockData, mockImage, mockImages } from "../data/mock.ts";
import { type PatchGrid, patchWidth } from "../models/radio/config.ts";
import type { Device } from "../native/device.ts";
import { UserError } from "../native/errors.ts";
import { topologyOf } from "../parallel/topology.ts";
import { World } from "../parallel/world.ts";
import type { Schedule, StepPlace } from "../train/schedule.ts";
import { type TrainingState, trainStep } from "../train/step.ts";
import { openRun } from "../train/training-run.ts";
import { imaginedGroup, type Transfer } from "./imagined-group.ts";

/** Parts of a step in order. */
export type Phase = "prepare" | "forward" | "backward" | "update";

export interface RankRun extends Disposable {
	readonly module: "radio_encoder" | "language";
	/** Draws the model's initial values: for a run on a real device. */
	initialise(): void;
	/** Trains one step on `microbatches` of this rank's. */
	step(microbatches: number): void;
}

export interface RankObserver {
	readonly phase: (phase: Phase) => void;
	readonly transfer: (transfer: Transfer) => void;
	/** Rows that other ranks' routers send to this one's experts, over those of an even routing. */
	readonly imbalance: number;
}

/** Microbatches of a step of one lane. */
export function microbatchesOf(c: TrainingConfiguration): number {
	return c.globalBatchSize / (c.microBatchSize * dataLanes(c));
}

/** Throws a UserError where the configuration asks for what no run can do. */
export async function openRank(
	c: TrainingConfiguration,
	device: Device,
	rank: number,
	observer: RankObserver,
): Promise<RankRun> {
	const topology = topologyOf(c);
	if (c.llmPp > 1) throw new UserError("A plan knows no pipeline stages yet: set llm-pp to 1.");
	const { grid, tokens } = mockImage(c);
	const imagination = {
		observe: observer.transfer,
		integers: (length: number) => new Int32Array(length).fill(tokens),
		imbalance: observer.imbalance,
	};
	const world = World.imagined(device, rank, topology.worldSize, (name, ranks) =>
		imaginedGroup(name, ranks, rank, imagination),
	);
	const run = await openRun(c, world);
	// Made once: a run's data are made beside it.
	const made: ReturnType<typeof run.batchOf>[] = [];
	const batches = (count: number) => {
		for (let index = made.length; index < count; index++) {
			const text = run.language ? textMicrobatch(c, tokens, index) : noText;
			const images = run.encoder ? imageSet(c, grid) : noImages(c.microBatchSize);
			made.push(run.batchOf({ text, images }));
		}
		return made.slice(0, count);
	};
	const lastOfForward = run.language ? "per_token_loss" : "encoder.projector";
	return {
		module: run.language === null ? "radio_encoder" : "language",
		initialise: () => {
			run.initialise(c.seed);
			run.state.optimizer.refreshMasters();
		},
		step: (count) => step(c, run.state, batches(count), lastOfForward, observer),
		[Symbol.dispose]: () => run[Symbol.dispose](),
	};
}

function textMicrobatch(c: TrainingConfiguration, imageTokens: number, index: number): Microbatch {
	const data = new MockData({
		seed: c.seed,
		size: (index + 1) * c.microBatchSize,
		sequenceLength: c.seqLength,
		vocabularySize: c.vocabSize,
		imageTokenId: c.imageTokenId,
		imageTokens,
	});
	return data.microbatch(index * c.microBatchSize, c.microBatchSize);
}

function imageSet(c: TrainingConfiguration, grid: PatchGrid): ImageSet {
	return mockImages(encoderMicroBatchSize(c), grid, patchWidth({ patchSize: c.patchDim }));
}

/** A step whose phases are told: the last value of a forward pass ends it. */
function step<Batch>(
	c: TrainingConfiguration,
	state: TrainingState<Batch>,
	microbatches: readonly Batch[],
	lastOfForward: string,
	observer: RankObserver,
): void {
	const schedule: Schedule<Batch> = {
		run: (batches, place: StepPlace, losses, observe = () => {}) => {
			observer.phase("forward");
			state.schedule.run(batches, place, losses, (name, value, index) => {
				observe(name, value, index);
				if (name === lastOfForward) observer.phase("backward");
			});
			observer.phase("update");
		},
	};
	observer.phase("prepare");
	const scheduled = { learningRate: c.lr, weightDecay: c.weightDecay };
	trainStep({ ...state, schedule }, { microbatches, iteration: 0, ...scheduled });
}
