/** What one rank of a training holds, whatever its module: its parts of the modules, the optimizer, where its data go. */
import { hasEncoder } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { EncoderModule } from "../models/mimo/encoder.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { ModuleGroups } from "../parallel/module-groups.ts";
import { type Topology, topologyOf } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { colocatedRun } from "./colocated-run.ts";
import { languageRun } from "./language-run.ts";
import type { Decoder, Evaluator, Schedule } from "./schedule.ts";
import { sideRun } from "./side-run.ts";
import type { TrainingState } from "./step.ts";

/** `Batch`: what this rank's schedule takes: text, images, or both. */
export interface TrainingRun<Batch> extends Disposable {
	readonly topology: Topology;
	/** This rank in the run, from 0. */
	readonly rank: number;
	readonly state: TrainingState<Batch> & { readonly schedule: Schedule<Batch> & Evaluator<Batch> & Decoder<Batch> };
	/** The language model's part on this rank; null on ranks of the encoder. */
	readonly language: HybridModel | null;
	/** The encoder's part on this rank; null on ranks of the language model, and without an encoder. */
	readonly encoder: EncoderModule | null;
	/** Communication groups of the module on this rank; null where one process holds both. */
	readonly groups: ModuleGroups | null;
	/** What this rank's schedule takes of a microbatch. */
	batchOf(microbatch: ImageTextMicrobatch): Batch;
	/** Draws the initial weights. */
	initialise(seed: number): void;
	/** This rank's part of every tensor of its modules, buffers included. The receiver disposes them. */
	logicalTensors(): Generator<LogicalTensor>;
}

/** Every rank of the world calls this together. */
export async function openRun(c: TrainingConfiguration, world: World): Promise<TrainingRun<unknown>> {
	const topology = topologyOf(c);
	if (!hasEncoder(c)) return await languageRun(c, topology, world);
	return topology.colocated ? colocatedRun(c, topology, world) : await sideRun(c, topology, world);
}

/** Whether this rank prints and logs: the last one, as in Megatron. */
export function reports({ topology, rank }: Pick<TrainingRun<unknown>, "topology" | "rank">): boolean {
	return rank === topology.worldSize - 1;
}
