/** Runs a rank's actions of a step, an evaluation or a decoding on microbatches. */
import { type PlacedImages, placesInStep } from "../data/images.ts";
import { type ImageTextMicrobatch, sampleLengths } from "../data/microbatch.ts";
import { samplesOfShares } from "../data/routing/image-share.ts";
import { type Decoded, type DecodingOptions, type DecodingRanks, decode, splitIds } from "../decode/decode.ts";
import type { Sampled } from "../elastic/router/router.ts";
import type { EncodeImages, RankGuest, StepGuest } from "../guests/guest.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import type { StepTimers } from "../observe/timers.ts";
import { consecutive, type Edge, type Rows } from "../parallel/index.ts";
import type { Action, Actor, Chunk, ScheduleShape } from "../schedule/actions.ts";
import { execute } from "../schedule/execute.ts";
import type { ModulePasses } from "../schedule/pass.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { type Parameter, type Tensor, TokenSlice } from "../tensor/index.ts";
import { type Teacher, teaches } from "./distillation.ts";
import { EncoderPass } from "./encoder-pass.ts";
import { LanguagePass } from "./language-pass.ts";
import type { Losses } from "./losses.ts";

/** Called with each activation and its microbatch, from 0; names of the encoder's begin with "encoder.". */
export type MicrobatchObserver = (name: string, value: Tensor, microbatch: number) => void;

/** What the passes of a step depend on beside their microbatches. */
export interface StepContext {
	/** Philox key of the step's dropout masks and random crops. */
	readonly dropoutKey: number;
	/** Indices of the microbatches' tokens, in order, in the step's global batch; default: from 0. */
	readonly tokens?: TokenSlice | undefined;
	/** Sampled submodels of the microbatches of an elastic model. */
	readonly elastic?: readonly Sampled[] | undefined;
	/** Microbatches of the next step, if known. */
	readonly upcoming?: readonly ImageTextMicrobatch[] | undefined;
	/** Called when a parameter's gradient has its last contribution of the step. */
	readonly onGradient?: ((parameter: Parameter) => void) | undefined;
	/** Called when this rank begins (true) and ceases (false) to wait for rows or gradients. */
	readonly waits?: ((waiting: boolean) => void) | undefined;
	readonly timers?: StepTimers | undefined;
	/** Called before every action. */
	readonly action?: ((action: Action) => void) | undefined;
}

/** The parts of a rank that the passes use. */
export interface PassParts {
	readonly encoder: EncoderModule | null;
	readonly language: HybridModel | null;
	/** null without an encoder. */
	readonly imageTokenId: number | null;
	/** null: no distillation. */
	readonly teacher: Teacher | null;
	/** Edges with an end here, by the chunk of the language model that they enter. */
	readonly edges: ReadonlyMap<number, Edge>;
	readonly shape: Omit<ScheduleShape, "microbatches" | "forwardOnly">;
	readonly actor: Actor;
	/** This rank's guests. */
	readonly guests: readonly RankGuest[];
	/** Starts the reduction of a module's gradients. */
	readonly reduce: (module: Chunk["module"]) => void;
}

export class RankPasses {
	constructor(readonly parts: PassParts) {}

	/** This rank's actions of a step of `microbatches` microbatches. */
	actions(microbatches: number, forwardOnly = false): Action[] {
		const { shape, actor } = this.parts;
		return actionsOf({ ...shape, microbatches, forwardOnly }, actor);
	}

	/**
	 * Runs the microbatches of a step forward and backward. Gradients are accumulated, and their reductions have started on
	 * return.
	 */
	train(
		microbatches: readonly ImageTextMicrobatch[],
		context: StepContext,
		losses: Losses,
		observe?: MicrobatchObserver,
	): void {
		this.#execute(microbatches, context, losses, observe, true);
	}

	/**
	 * Runs microbatches forward only, without dropout or counting in routers. `elastic`: sampled submodels; default: the parent.
	 */
	evaluate(
		microbatches: readonly ImageTextMicrobatch[],
		losses: Losses,
		observe?: MicrobatchObserver,
		elastic?: readonly Sampled[],
	): void {
		this.#execute(microbatches, { dropoutKey: 0, elastic }, losses, observe, false);
		this.requireRoomForRows();
	}

	/**
	 * Throws a UserError if experts of this rank were sent more rows than they have room for since the last call; waits for the
	 * device.
	 */
	requireRoomForRows(): void {
		const { language, teacher } = this.parts;
		language?.requireRoomForRows();
		if (teacher?.teacher === "frozen") teacher.model.requireRoomForRows();
	}

	/**
	 * Decodes the prompts of a microbatch, one a sequence: the encoder sends image rows over the edge once, then the language
	 * ranks decode. Returns null on ranks without the language model. `numbers`: indices of the sequences in the run, which key
	 * random numbers; further sequences are padding of the microbatch. `turn`: the microbatch's index, for encoder ranks that
	 * encode in turn.
	 */
	decode(
		prompts: ImageTextMicrobatch,
		options: DecodingOptions,
		ranks: Omit<DecodingRanks, "edges">,
		numbers?: readonly number[],
		turn = 0,
	): Decoded | null {
		const { encoder, language, edges, imageTokenId } = this.parts;
		const images = edges.get(0);
		if (encoder) {
			const { images: placed, guests } = this.#begin([prompts], { training: false });
			const about = { cropKey: 0, training: false, encode: encodingOf(guests, 0) };
			using encoded = new EncoderPass(encoder, placed[0]!, about);
			images!.sendForward(encoded.output, { returns: false });
		}
		const enters = language?.chunks[0]?.segment.embeds === true && images !== undefined;
		using rows = enters ? images.receiveForward(samplesFrom(images, prompts, turn), { returns: false }).rows : null;
		images?.settle();
		if (language === null) return null;
		const text = { ids: splitIds(prompts.text), rows, imageTokenId: imageTokenId ?? -1, ...(numbers && { numbers }) };
		const decoded = decode(language, text, options, { ...ranks, edges });
		language.requireRoomForRows();
		return decoded;
	}

	#execute(
		microbatches: readonly ImageTextMicrobatch[],
		context: StepContext,
		losses: Losses,
		observe: MicrobatchObserver | undefined,
		training: boolean,
	): void {
		const { encoder, language, edges, reduce } = this.parts;
		const { waits, timers, onGradient } = context;
		/** onGradient fires in the last microbatch only, which completes gradients. */
		const listen = (microbatch: number) => (onGradient && microbatch === microbatches.length - 1 ? { onGradient } : {});
		const step = this.#begin(microbatches, { training, upcoming: context.upcoming });
		const common = { ...step, microbatches, context, observe, training, listen };
		execute(this.actions(microbatches.length, !training), {
			modules: {
				...(encoder && { encoder: this.#encoderPasses(encoder, common) }),
				...(language && { language: this.#languagePasses(language, common, losses) }),
			},
			edges,
			reduce,
			...(waits && { waits }),
			timers,
			observe: this.#beforeAction(context),
		});
	}

	/** The images of the microbatches of a step, and what guests do in it. Collective over each module. */
	#begin(
		microbatches: readonly ImageTextMicrobatch[],
		{ training, upcoming = [] }: { readonly training: boolean } & Pick<StepContext, "upcoming">,
	) {
		const images = placesInStep(microbatches.map(({ images }) => images));
		const guests = this.parts.guests.map((guest) => guest.beforeStep?.({ microbatches, images, upcoming, training }));
		return { images, guests: guests.filter((guest) => guest != null) };
	}

	/** What is called before every action; undefined: nothing. */
	#beforeAction({ action }: StepContext): StepContext["action"] {
		const guests = this.parts.guests.filter(({ beforeAction }) => beforeAction);
		if (guests.length === 0) return action;
		return (next) => {
			action?.(next);
			for (const guest of guests) guest.beforeAction!(next);
		};
	}

	#encoderPasses(encoder: EncoderModule, common: Common): ModulePasses {
		const { images, guests, context, observe, training, listen } = common;
		const trains = training && this.parts.shape.encoder!.trains;
		return {
			begin: (_, index) =>
				new EncoderPass(encoder, images[index]!, {
					cropKey: context.dropoutKey,
					training: trains,
					encode: encodingOf(guests, index),
					observe: observe && ((name, value) => observe(`encoder.${name}`, value, index)),
					...listen(index),
				}),
			expected: () => [],
		};
	}

	#languagePasses(model: HybridModel, common: Common, losses: Losses): ModulePasses {
		const { microbatches, context, observe, training, listen } = common;
		const { shape, imageTokenId } = this.parts;
		const lengths = microbatches.map(({ text }) => text.ids.length);
		const { offsets: starts } = consecutive(lengths);
		const tokens = context.tokens ?? TokenSlice.of(0, starts.at(-1)! + lengths.at(-1)!);
		const teacherOf = (index: number) => {
			const { teacher } = this.parts;
			const learns = teacher !== null && training && teaches(teacher, context.elastic?.[index] ?? null);
			return learns ? teacher : null;
		};
		return {
			besides: (index) => teacherOf(index) !== null,
			begin: (chunk: number, index: number, input: Rows | null) =>
				new LanguagePass(
					model,
					model.chunks[Math.floor(chunk / shape.stages)]!,
					microbatches[index]!.text,
					input,
					losses,
					{
						imageTokenId,
						elastic: context.elastic?.[index] ?? null,
						teacher: teacherOf(index),
						name: `microbatch ${index}`,
						dropoutKey: context.dropoutKey,
						tokens: tokens.rows(starts[index]!, lengths[index]!),
						training,
						wantsGradient: chunk > 0 || shape.encoder?.trains === true,
						observe: observe && ((name, value) => observe(name, value, index)),
						...listen(index),
					},
				),
			expected: (chunk, index) =>
				chunk === 0
					? samplesFrom(this.parts.edges.get(0)!, microbatches[index]!, index)
					: [lengths[index]! / model.parallel.tp.size],
		};
	}
}

interface Common {
	readonly microbatches: readonly ImageTextMicrobatch[];
	/** Of each microbatch. */
	readonly images: readonly PlacedImages[];
	readonly guests: readonly StepGuest[];
	readonly context: StepContext;
	readonly observe: MicrobatchObserver | undefined;
	readonly training: boolean;
	readonly listen: (microbatch: number) => { readonly onGradient?: (parameter: Parameter) => void };
}

/** How the first guest that has a say encodes a microbatch; null: as without guests. */
function encodingOf(guests: readonly StepGuest[], microbatch: number): EncodeImages | null {
	for (const guest of guests) {
		const encode = guest.encode?.(microbatch);
		if (encode) return encode;
	}
	return null;
}

/** Samples of a microbatch by the source of the edge that their rows come from. */
function samplesFrom(edge: Edge, { text }: ImageTextMicrobatch, index: number): number[] {
	return samplesOfShares(sampleLengths(text).length, edge.sources, index);
}
