/**
 * A guest: a feature beside the spine of a training, which names none of them (src/train, src/schedule, src/parallel). Assembly opens
 * a run's guests on every rank; a step calls the hooks that they have, and one without guests calls none. Adding one:
 * docs/add-a-guest.md.
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { DeviceInput } from "../data/device-input.ts";
import type { PlacedImages } from "../data/images.ts";
import type { ImageTextMicrobatch, Microbatch } from "../data/microbatch.ts";
import type { HybridConfig } from "../models/language/config.ts";
import type { ModelMasks } from "../models/language/masks.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { ForwardInput, ModelChunk, Observer } from "../models/language/model-chunk.ts";
import type { PipelineSegment } from "../models/language/pipeline-segments.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { EncoderObserver } from "../models/tower.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import type { RunEvent } from "../observe/step-report.ts";
import type { Companion, DataParallel, ModuleGroups, Topology } from "../parallel/index.ts";
import type { Action } from "../schedule/actions.ts";
import type { Tape, Tensor } from "../tensor/index.ts";

/** A guest as a run is configured to have it, equal on every rank. */
export interface Guest {
	/** Whether it wants to know a step's microbatches in the step before; default: no. */
	readonly readsAhead?: boolean;
	/** Why results depend on which samples share a microbatch; absent: they do not. */
	readonly pools?: string;
	/** Its losses, in the order of the log. */
	readonly losses?: (model: HybridConfig) => readonly LossName[];
	/** Models that evaluations run beside the model itself. */
	readonly evaluations?: readonly Evaluation[];
	/** Whether evaluations leave the model itself out; default: no. */
	readonly evaluatedAlone?: boolean;
	/** The guest on this rank; null: it has nothing to do here. */
	readonly open: (rank: RankModules) => RankGuest | null;
}

/** A loss that is accumulated over a step. */
export interface LossName {
	readonly name: string;
	/** Whether evaluations have it not; default: they have it. */
	readonly trainingOnly?: boolean;
	/** Whether a step may have none, and then does not report it; default: each step has it. */
	readonly partial?: boolean;
}

/** A rank's part of a run, as guests see it. */
export interface RankModules {
	readonly topology: Topology;
	readonly encoders: readonly (Held<EncoderModule> & { readonly name: string })[];
	/** null on ranks without it. */
	readonly language: Held<HybridModel> | null;
	/** The layers of each of the language model's chunks, on all stages. */
	readonly segments: readonly PipelineSegment[];
}

interface Held<Module> {
	readonly module: Module;
	readonly groups: ModuleGroups;
}

/** Numbers by name, equal on all ranks that have them. */
export type Kept = Readonly<Record<string, number[]>>;

/** A guest on one rank. */
export interface RankGuest {
	readonly modules?: readonly GuestModule[];
	/** Reads what it needs before the first step. Throws a UserError that names the path. */
	load?(c: TrainingConfiguration): Promise<void>;
	/** Numbers that a checkpoint has to keep for the training to go on as it would have, by names of its own; default: none. */
	keep?(): Kept;
	/** Takes what a checkpoint kept; {}: the training begins, or its checkpoint kept nothing. */
	restore?(kept: Kept): void;
	/** Called before the passes of a step, an evaluation or a decoding; null: nothing to do in them. */
	beforeStep?(step: GuestStep): StepGuest | null;
	/** Called before every action of a step. */
	beforeAction?(action: Action): void;
	/** Sentences about an evaluation with these losses. */
	report?(losses: Readonly<Record<string, number>>): GuestReport;
	[Symbol.dispose]?(): void;
}

/** A module that a guest brings. */
export interface GuestModule {
	readonly module: {
		initialise(seed: number): void;
		logicalTensors(): Generator<LogicalTensor>;
		/** Throws a UserError if experts were sent more rows than they have room for. */
		requireRoomForRows?(): void;
		[Symbol.dispose](): void;
	};
	/** null: the module is frozen, and in no checkpoint of the run. */
	readonly trained: {
		readonly replica: DataParallel;
		/** With this the names of its tensors begin. */
		readonly prefix: string;
		/** Whether this rank's copy of its tensors is the one to save or sum. */
		readonly counts: boolean;
		readonly learningRateMultiplier: number;
	} | null;
}

export interface GuestReport {
	readonly event: (step: number) => RunEvent;
	/** Sentences on held-out losses. */
	readonly sentences: readonly string[];
}

/** The microbatches of a rank that are about to run. */
export interface GuestStep {
	readonly microbatches: readonly ImageTextMicrobatch[];
	/** The input of each encoder of this rank in each microbatch, with the items' places in the step. */
	readonly features: ReadonlyMap<string, readonly PlacedImages[]>;
	/** Microbatches of the next step, where they are known. */
	readonly upcoming: readonly ImageTextMicrobatch[];
	/** Number of steps before this one. */
	readonly iteration: number;
	/** Whether backward passes follow. */
	readonly training: boolean;
	/** The part of the model that a microbatch runs, by the guest that says it; null: all of it. Known when every guest has begun the step. */
	readonly variant: (microbatch: number) => Variant | null;
}

/** A guest's work in one step. */
export interface StepGuest {
	/** How an encoder encodes a microbatch; null: as without the guest. Encoder ranks ask this before each pass. */
	encode?(encoder: EncoderModule, microbatch: number): EncodeImages | null;
	/** The part of the language model that a microbatch runs; null: as without the guest. */
	variant?(microbatch: number): Variant | null;
	/** Matrices [rows, width] that travel beside a microbatch's hidden states from chunk to chunk; default: none. */
	companions?(microbatch: number): readonly Companion[];
	/** Called before a chunk of the language model runs a microbatch. Returns the companions, which the pass disposes. */
	beforeChunk?(pass: LanguageView): readonly Tensor[];
	/** Called with the chunk's activations as `tape` records them, first with "entered", its input; null: nothing. */
	observer?(pass: RecordedView): Observer | null;
	/** Weight of the next-token loss; those of several guests are multiplied. Default: 1. */
	share?(microbatch: number): number;
	/** Further losses of a microbatch, on the rank with the output layer. They are asked guest by guest. */
	losses?(pass: HeadView): Iterable<LossTerm>;
	/**
	 * Called after the last backward pass of this rank, before its gradients are summed over replicas. `weights`: of each
	 * microbatch's mean loss in the sum that is differentiated; 0 on ranks that do not count its losses.
	 */
	afterBackward?(weights: readonly number[]): void;
	[Symbol.dispose]?(): void;
}

/**
 * Records on `tape` the encoder's pass over the images that this rank has read; their rows_RH, which the caller disposes.
 * `cropKey`: Philox key of the step's random crops.
 */
export type EncodeImages = (
	tape: Tape,
	images: PlacedImages,
	options: { readonly cropKey: number; readonly observe?: EncoderObserver | undefined },
) => Tensor;

/** A part of the language model that a microbatch runs. */
export interface Variant {
	readonly masks: ModelMasks;
	/** In names of losses, such as "0.700". */
	readonly label: string;
	/** Whether it is all of the model. */
	readonly whole: boolean;
}

/** A part of the language model that evaluations run. */
export interface Evaluation {
	/** In names of losses, such as "budget 0.7". */
	readonly label: string;
	readonly value: number;
	/** The variants of `count` microbatches, by the guest that makes them; null on ranks without it. */
	readonly variants: (guests: readonly RankGuest[], count: number) => Variants | null;
}

export interface Variants extends Disposable {
	readonly microbatches: readonly Variant[];
}

/** One microbatch's pass through a chunk of the language model. */
export interface LanguageView {
	readonly microbatch: number;
	readonly text: Microbatch;
	readonly chunk: ModelChunk;
	/** Index of the chunk on this rank. */
	readonly place: number;
	/** Input of a chunk on a tape: image rows without gradient, no masks. */
	readonly input: (tape: Tape) => ForwardInput;
	/** The guest's companions from the chunk before. */
	readonly companions: readonly Tensor[];
	/** Weight of a mean over the microbatch's loss tokens in the sum that is differentiated. */
	readonly weight: number;
	readonly observe: Observer | undefined;
	/** Keeps `owned` until the pass ends. */
	readonly own: <Owned extends Disposable>(owned: Owned) => Owned;
}

/** A chunk that runs a microbatch. */
export interface RecordedView extends Omit<LanguageView, "input"> {
	readonly tape: Tape;
	readonly forward: ForwardInput;
}

/** The end of a microbatch's last chunk. */
export interface HeadView extends RecordedView {
	/** Normed hidden states_(T/tp)H of the main part. */
	readonly hidden: Tensor;
	readonly input: Pick<DeviceInput, "labels" | "mask" | "cut">;
	/** f32 [T / cp]: the weight of each token's loss in the sum that is differentiated. */
	readonly tokenWeights: Tensor;
	/** Logits_T(V/tp) and loss_T of the next token, recorded at the first call, in their place among the losses. */
	nextToken(): { readonly logits: Tensor; readonly loss: Tensor };
	/** Records loss_T of `labels` from normed hidden states_(T/tp)H. */
	tokenLoss(normed: Tensor, labels: Tensor, observe?: Observer): Tensor;
}

/** A loss of a microbatch, owned by its pass. */
export interface LossTerm {
	readonly name: string;
	/** f32, and the weight of each element in the mean that is logged. */
	readonly loss: Tensor;
	readonly mask: Tensor;
	/** The weight of each element in the sum that is differentiated; null: the loss is only logged. */
	readonly gradient: Tensor | null;
}
