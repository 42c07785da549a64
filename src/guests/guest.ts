/**
 * A guest: a feature beside the spine of a training, which names none of them (src/train, src/schedule, src/parallel). Assembly opens
 * a run's guests on every rank; a step calls the hooks that they have, and one without guests calls none. Adding one:
 * docs/add-a-guest.md.
 */
import type { PlacedImages } from "../data/images.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { RadioObserver } from "../models/radio/model.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import type { ModuleGroups, Topology } from "../parallel/index.ts";
import type { Action } from "../schedule/actions.ts";
import type { Tape, Tensor } from "../tensor/index.ts";

/** A guest as a run is configured to have it, equal on every rank. */
export interface Guest {
	/** Whether it wants to know a step's microbatches in the step before; default: no. */
	readonly readsAhead?: boolean;
	/** The guest on this rank; null: it has nothing to do here. */
	readonly open: (rank: RankModules) => RankGuest | null;
}

/** A rank's part of a run, as guests see it. */
export interface RankModules {
	readonly topology: Topology;
	readonly encoders: readonly RankEncoder[];
}

/** A rank's part of an encoder. */
export interface RankEncoder {
	readonly name: string;
	readonly module: EncoderModule;
	readonly groups: ModuleGroups;
}

/** A guest on one rank. */
export interface RankGuest {
	/** Called before the passes of a step, an evaluation or a decoding; null: nothing to do in them. */
	beforeStep?(step: GuestStep): StepGuest | null;
	/** Called before every action of a step. */
	beforeAction?(action: Action): void;
	[Symbol.dispose]?(): void;
}

/** The microbatches of a rank that are about to run. */
export interface GuestStep {
	readonly microbatches: readonly ImageTextMicrobatch[];
	/** Of each microbatch, with their places in the step. */
	readonly images: readonly PlacedImages[];
	/** Microbatches of the steps to come, as far as they are known. */
	readonly upcoming: readonly ImageTextMicrobatch[];
	/** Whether backward passes follow. */
	readonly training: boolean;
}

/** What a guest does in one step. */
export interface StepGuest {
	/** How an encoder encodes a microbatch; null: as without the guest. Encoder ranks ask this before each pass. */
	encode?(encoder: EncoderModule, microbatch: number): EncodeImages | null;
}

/**
 * Records on `tape` the encoder's pass over the images that this rank has read; their rows_RH, which the caller disposes.
 * `cropKey`: Philox key of the step's random crops.
 */
export type EncodeImages = (
	tape: Tape,
	images: PlacedImages,
	options: { readonly cropKey: number; readonly observe?: RadioObserver | undefined },
) => Tensor;
