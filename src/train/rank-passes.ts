/** All passes of one rank's modules: the actions of a step, or of an evaluation, executed on microbatches. */
import { placesInStep } from "../data/images.ts";
import { type ImageTextMicrobatch, sampleLengths } from "../data/microbatch.ts";
import { samplesOfShares } from "../data/routing/image-share.ts";
import { type Decoded, type DecodingOptions, type DecodingRanks, decode, splitIds } from "../decode/decode.ts";
import type { Sampled } from "../elastic/router/router.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import type { StepTimers } from "../observe/timers.ts";
import type { Edge, Rows } from "../parallel/edge.ts";
import { consecutive } from "../parallel/group.ts";
import type { Action, Actor, Chunk, ScheduleShape } from "../schedule/actions.ts";
import { execute } from "../schedule/execute.ts";
import type { ModulePasses } from "../schedule/pass.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import type { Parameter } from "../tensor/parameter.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { TokenSlice } from "../tensor/token-slice.ts";
import { type Teacher, teaches } from "./distillation.ts";
import { balanceImages, type EncoderLanes } from "./encoder-balance.ts";
import { EncoderPass } from "./encoder-pass.ts";
import type { FeaturePrefetch } from "./feature-prefetch.ts";
import { LanguagePass } from "./language-pass.ts";
import type { Losses } from "./losses.ts";

/** Called with values as they arise and the microbatch, from 0, they belong to; the encoder's are "encoder.…". */
export type MicrobatchObserver = (name: string, value: Tensor, microbatch: number) => void;

/** Arguments of a step's passes. */
export interface StepPlace {
	/** Key of the step's dropout masks and crops. */
	readonly dropoutKey: number;
	/** The microbatches' tokens, in order, among those of the step's global batch; default: from the first on. */
	readonly tokens?: TokenSlice | undefined;
	/** Samples of the microbatches of an elastic model. */
	readonly elastic?: readonly Sampled[] | undefined;
	/** Microbatches of the step after, where they are known. */
	readonly upcoming?: readonly ImageTextMicrobatch[] | undefined;
	/** Called when the step's last microbatch has completed a parameter's gradient. */
	readonly onGradient?: ((parameter: Parameter) => void) | undefined;
	/** Called when this rank begins (true) and ceases (false) to wait for rows or gradients. */
	readonly waits?: ((waiting: boolean) => void) | undefined;
	readonly timers?: StepTimers | undefined;
	/** Called before every action. */
	readonly action?: ((action: Action) => void) | undefined;
}

/** The parts of a rank that its passes need. */
export interface PassParts {
	readonly encoder: EncoderModule | null;
	readonly language: HybridModel | null;
	/** null without an encoder. */
	readonly imageTokenId: number | null;
	/** The language model's teacher; null: it has none. */
	readonly teacher: Teacher | null;
	/** The encoder's data-parallel ranks, which share images by cost; null: each encodes what it has read. */
	readonly encoderLanes: EncoderLanes | null;
	/** Edges with an end here, by the chunk of the language model that they enter. */
	readonly edges: ReadonlyMap<number, Edge>;
	readonly shape: Omit<ScheduleShape, "microbatches" | "forwardOnly">;
	readonly actor: Actor;
	/** Runs a frozen tower ahead; null: every microbatch in its turn. */
	readonly prefetch: FeaturePrefetch | null;
	/** Starts the sums of a module's gradients. */
	readonly reduce: (module: Chunk["module"]) => void;
}

export class RankPasses {
	constructor(readonly parts: PassParts) {}

	/** This rank's actions for that many microbatches, in order. */
	actions(microbatches: number, forwardOnly = false): Action[] {
		const { shape, actor } = this.parts;
		return actionsOf({ ...shape, microbatches, forwardOnly }, actor);
	}

	/** All microbatches of a step forward and backward; gradients add up, and their sums over replicas have begun. */
	train(
		microbatches: readonly ImageTextMicrobatch[],
		place: StepPlace,
		losses: Losses,
		observe?: MicrobatchObserver,
	): void {
		this.parts.prefetch?.announce([...microbatches, ...(place.upcoming ?? [])].map(({ images }) => images));
		this.#execute(microbatches, place, losses, observe, true);
	}

	/** Microbatches forward only: no dropout, routers do not count. `elastic`: samples of an elastic model; default: the parent. */
	evaluate(
		microbatches: readonly ImageTextMicrobatch[],
		losses: Losses,
		observe?: MicrobatchObserver,
		elastic?: readonly Sampled[],
	): void {
		this.#execute(microbatches, { dropoutKey: 0, elastic }, losses, observe, false);
		this.requireRoomForRows();
	}

	/** A UserError when experts of this rank were sent more rows than they have room for since the last call; waits for the device. */
	requireRoomForRows(): void {
		const { language, teacher } = this.parts;
		language?.requireRoomForRows();
		if (teacher?.teacher === "frozen") teacher.model.requireRoomForRows();
	}

	/**
	 * Continues the prompts of a microbatch, a sequence a sample: image rows come over the edge once, then the language ranks
	 * decode. null on ranks without the language model. `numbers`: of the sequences in their run, which random numbers follow;
	 * sequences past them only fill the microbatch up. `turn`: the microbatch's number, where encoder ranks take turns.
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
			const { images: placed, deals } = this.#dealt([prompts]);
			const about = { cropKey: 0, training: false, deal: deals?.[0] ?? null };
			using encoded = new EncoderPass(encoder, placed[0]!, about);
			images!.sendForward(encoded.output, false);
		}
		const enters = language?.stages[0]?.segment.embeds === true && images !== undefined;
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
		place: StepPlace,
		losses: Losses,
		observe: MicrobatchObserver | undefined,
		training: boolean,
	): void {
		const { encoder, language, edges, reduce } = this.parts;
		const { waits, timers, onGradient } = place;
		/** Gradients of the last microbatch are complete. */
		const listen = (microbatch: number) => (onGradient && microbatch === microbatches.length - 1 ? { onGradient } : {});
		const common = { microbatches, place, observe, training, listen };
		execute(this.actions(microbatches.length, !training), {
			modules: {
				...(encoder && { encoder: this.#encoderPasses(encoder, common) }),
				...(language && { language: this.#languagePasses(language, common, losses) }),
			},
			edges,
			reduce,
			...(waits && { waits }),
			timers,
			observe: place.action,
		});
	}

	/** Images of a step's microbatches, and the lanes that encode them. All ranks of the encoder call this together. */
	#dealt(microbatches: readonly ImageTextMicrobatch[]) {
		const { encoder, encoderLanes } = this.parts;
		const images = placesInStep(microbatches.map(({ images }) => images));
		return { images, deals: encoderLanes && balanceImages(encoder!, encoderLanes, images) };
	}

	#encoderPasses(encoder: EncoderModule, { microbatches, place, observe, training, listen }: Common): ModulePasses {
		const { prefetch, shape } = this.parts;
		const { images: placed, deals } = this.#dealt(microbatches);
		const trains = training && shape.encoder!.trains;
		return {
			begin: (_, index) => {
				const { images } = microbatches[index]!;
				const features = training && images.grids.length > 0 ? (prefetch?.take(images) ?? null) : null;
				return new EncoderPass(encoder, placed[index]!, {
					cropKey: place.dropoutKey,
					training: trains,
					features,
					deal: deals?.[index] ?? null,
					observe: observe && ((name, value) => observe(`encoder.${name}`, value, index)),
					...listen(index),
				});
			},
			expected: () => [],
			// While the gradient is on its way the tower may run ahead on images to come.
			beforeWait: () => prefetch?.fill(),
		};
	}

	#languagePasses(model: HybridModel, common: Common, losses: Losses): ModulePasses {
		const { microbatches, place, observe, training, listen } = common;
		const { shape, imageTokenId } = this.parts;
		const lengths = microbatches.map(({ text }) => text.ids.length);
		const { offsets: starts } = consecutive(lengths);
		const tokens = place.tokens ?? TokenSlice.of(0, starts.at(-1)! + lengths.at(-1)!);
		const teacherOf = (index: number) => {
			const { teacher } = this.parts;
			const learns = teacher !== null && training && teaches(teacher, place.elastic?.[index] ?? null);
			return learns ? teacher : null;
		};
		return {
			besides: (index) => teacherOf(index) !== null,
			begin: (chunk: number, index: number, input: Rows | null) =>
				new LanguagePass(
					model,
					model.stages[Math.floor(chunk / shape.stages)]!,
					microbatches[index]!.text,
					input,
					losses,
					{
						imageTokenId,
						elastic: place.elastic?.[index] ?? null,
						teacher: teacherOf(index),
						name: `microbatch ${index}`,
						dropoutKey: place.dropoutKey,
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
	readonly place: StepPlace;
	readonly observe: MicrobatchObserver | undefined;
	readonly training: boolean;
	readonly listen: (microbatch: number) => { readonly onGradient?: (parameter: Parameter) => void };
}

/** Samples of a microbatch whose rows come from each of an edge's sources. */
function samplesFrom(edge: Edge, { text }: ImageTextMicrobatch, index: number): number[] {
	return samplesOfShares(sampleLengths(text).length, edge.sources, index);
}
