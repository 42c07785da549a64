/** Runs a rank's actions of a step, an evaluation or a decoding on microbatches. */
import { type PlacedImages, placesInStep } from "../data/images.ts";
import { featuresOf, type ImageTextMicrobatch, sampleLengths } from "../data/microbatch.ts";
import { samplesOfShares } from "../data/routing/image-share.ts";
import { type Decoded, type DecodingOptions, type DecodingRanks, decode, splitIds } from "../decode/decode.ts";
import type { EncodeImages, GuestStep, RankGuest, StepGuest, Variant } from "../guests/guest.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { PooledLinks } from "../models/language/pooled-balancing.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import type { StepTimers } from "../observe/timers.ts";
import { consecutive, type Edge } from "../parallel/index.ts";
import { type Action, type Actor, type Chunk, type ScheduleShape, sameChunk, trains } from "../schedule/actions.ts";
import { execute, type HeldEdge } from "../schedule/execute.ts";
import type { Input, ModulePasses } from "../schedule/pass.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { type Parameter, type Tensor, TokenSlice } from "../tensor/index.ts";
import { EncoderPass } from "./encoder-pass.ts";
import { LanguagePass } from "./language-pass.ts";
import type { Losses } from "./losses.ts";
import type { HeldModule } from "./rank-modules.ts";

/** Called with each activation and its microbatch, from 0; names of an encoder's begin with its name. */
export type MicrobatchObserver = (name: string, value: Tensor, microbatch: number) => void;

/** The links of all chunks of this rank for the pooled balancing loss. */
export interface PooledStages extends Pick<PooledLinks, "routers"> {
	readonly edges: readonly HeldEdge[];
}

function pooledLinks(stages: PooledStages | null, chunk: number): PooledLinks | null {
	if (stages === null) return null;
	const { routers, edges } = stages;
	const edgeOf = (end: "from" | "to") => edges.find((one) => one[end].index === chunk)?.edge ?? null;
	return { routers, before: edgeOf("to"), after: edgeOf("from") };
}

/** Inputs of the passes of a step beside their microbatches. */
export interface StepContext {
	/** Philox key of the step's dropout masks and random crops. */
	readonly dropoutKey: number;
	/** Indices of the microbatches' tokens, in order, in the step's global batch; default: from 0. */
	readonly tokens?: TokenSlice | undefined;
	/** Number of steps before this one; default: 0. */
	readonly iteration?: number;
	/** The part of the language model that the microbatches run; default: as guests say. */
	readonly variants?: readonly Variant[] | undefined;
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
	readonly encoders: readonly HeldModule<EncoderModule>[];
	readonly language: HybridModel | null;
	/** Ids of the tokens that encoders' rows replace, by the encoder's name. */
	readonly placeholders: ReadonlyMap<string, number>;
	/** Edges with an end here. */
	readonly edges: readonly HeldEdge[];
	readonly shape: Omit<ScheduleShape, "microbatches" | "forwardOnly">;
	readonly actor: Actor;
	/** How the chunks' counts for the pooled balancing loss are summed; null: the model has none. */
	readonly pooled: PooledStages | null;
	/** This rank's guests. */
	readonly guests: readonly RankGuest[];
	/** Starts the reduction of a module's gradients. */
	readonly reduce: (module: string) => void;
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
	 * Runs microbatches forward only, without dropout or counting in routers. `variants`: what they run of the language model;
	 * default: all of it.
	 */
	evaluate(
		microbatches: readonly ImageTextMicrobatch[],
		losses: Losses,
		observe?: MicrobatchObserver,
		variants?: readonly Variant[],
	): void {
		this.#execute(microbatches, { dropoutKey: 0, variants }, losses, observe, false);
		this.requireRoomForRows();
	}

	/**
	 * Throws a UserError if experts of this rank were sent more rows than they have room for since the last call; waits for the
	 * device.
	 */
	requireRoomForRows(): void {
		const { language, guests } = this.parts;
		language?.requireRoomForRows();
		for (const { modules = [] } of guests) for (const { module } of modules) module.requireRoomForRows?.();
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
		const { encoders, language, edges, placeholders, shape } = this.parts;
		for (const { name, module, groups } of encoders) {
			const { features, guests } = this.#begin([prompts], { dropoutKey: 0 }, false);
			const about = { cropKey: 0, training: false, encode: encodingOf(guests, module, 0) };
			const images = features.get(name)![0]!;
			const own = (chunk: Chunk) => sameChunk(chunk, { module: name, index: groups.stages.rank });
			const before = edges.find(({ to }) => own(to))?.edge;
			const rows = before?.receiveForward([streamRows(module, images)], { returns: false });
			using encoded = new EncoderPass(module, images, about, rows && { rows, returns: false });
			edges.find(({ from }) => own(from))!.edge.sendForward(encoded.output, { returns: false });
		}
		const ofEncoders = edges.filter(({ from }) => from.module !== shape.pipeline);
		const entering = ofEncoders.find(({ to }) => to.module === shape.pipeline);
		const images = entering?.edge;
		const enters = language?.chunks[0]?.segment.embeds === true && images !== undefined;
		using rows = enters ? images.receiveForward(samplesFrom(images, prompts, turn), { returns: false }).rows : null;
		for (const { edge } of ofEncoders) edge.settle();
		if (language === null) return null;
		const imageTokenId = entering === undefined ? -1 : placeholders.get(entering.from.module)!;
		const { positions } = prompts.text;
		const text = { ids: splitIds(prompts.text), rows, imageTokenId, positions, ...(numbers && { numbers }) };
		const stages = new Map(
			edges.filter(({ from }) => from.module === shape.pipeline).map(({ to, edge }) => [to.index, edge]),
		);
		const decoded = decode(language, text, options, { ...ranks, edges: stages });
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
		const { encoders, language, edges, reduce, shape } = this.parts;
		const { waits, timers, onGradient } = context;
		/** onGradient fires in the last microbatch only, which completes gradients. */
		const listen = (microbatch: number) => (onGradient && microbatch === microbatches.length - 1 ? { onGradient } : {});
		const step = this.#begin(microbatches, context, training);
		using _guests = disposing(step.guests);
		const common = { ...step, microbatches, context, observe, training, listen };
		execute(this.actions(microbatches.length, !training), {
			modules: new Map([
				...encoders.map((encoder) => [encoder.name, this.#encoderPasses(encoder, common)] as const),
				...(language ? [[shape.pipeline, this.#languagePasses(language, common, losses)] as const] : []),
			]),
			edges,
			reduce,
			...(waits && { waits }),
			timers,
			observe: this.#beforeAction(context),
		});
		for (const { edge } of this.parts.pooled?.edges ?? []) edge.settle();
		if (!training || step.guests.length === 0) return;
		const weights = microbatches.map(({ text }) => (losses.owner?.counts ? losses.weights.of(text).loss : 0));
		for (const guest of step.guests) guest.afterBackward?.(weights);
	}

	/** The encoders' input in the microbatches of a step, and the guests' work in it. Collective over each module. */
	#begin(
		microbatches: readonly ImageTextMicrobatch[],
		{ iteration = 0, upcoming = [], variants }: StepContext,
		training: boolean,
	) {
		const features = new Map(
			this.parts.encoders.map(({ name }) => [
				name,
				placesInStep(microbatches.map((microbatch) => featuresOf(microbatch, name))),
			]),
		);
		const variant = (microbatch: number): Variant | null =>
			variants?.[microbatch] ?? firstOf(guests, (guest) => guest.variant?.(microbatch));
		const step = { microbatches, features, iteration, upcoming, training, variant };
		const guests: StepGuest[] = this.parts.guests
			.map((guest) => guest.beforeStep?.(step) ?? null)
			.filter((guest) => guest !== null);
		return { features, guests, variant };
	}

	/** Function that is called before every action; undefined: none is. */
	#beforeAction({ action }: StepContext): StepContext["action"] {
		const guests = this.parts.guests.filter(({ beforeAction }) => beforeAction);
		if (guests.length === 0) return action;
		return (next) => {
			action?.(next);
			for (const guest of guests) guest.beforeAction!(next);
		};
	}

	#encoderPasses({ name, module }: HeldModule<EncoderModule>, common: Common): ModulePasses {
		const { features, guests, context, observe, training, listen } = common;
		const images = features.get(name)!;
		return {
			begin: (chunk, index, [entered = null]) =>
				new EncoderPass(
					module,
					images[index]!,
					{
						cropKey: context.dropoutKey,
						training: training && trains(this.parts.shape, { module: name, index: chunk }),
						encode: encodingOf(guests, module, index),
						observe: observe && ((value, tensor) => observe(`${name}.${value}`, tensor, index)),
						...listen(index),
					},
					entered,
				),
			expected: (_, index) => [streamRows(module, images[index]!)],
		};
	}

	#languagePasses(model: HybridModel, common: Common, losses: Losses): ModulePasses {
		const { microbatches, context, observe, training, listen } = common;
		const { shape, placeholders, edges } = this.parts;
		const lengths = microbatches.map(({ text }) => text.ids.length);
		const { offsets: starts } = consecutive(lengths);
		const tokens = context.tokens ?? TokenSlice.of(0, starts.at(-1)! + lengths.at(-1)!);
		const { guests, variant } = common;
		return {
			companions: (index) => guests.flatMap((guest) => guest.companions?.(index) ?? []),
			begin: (chunk: number, index: number, inputs: readonly Input[]) =>
				new LanguagePass(
					model,
					model.chunks[Math.floor(chunk / shape.stages)]!,
					microbatches[index]!.text,
					inputs,
					losses,
					{
						placeholders,
						microbatch: index,
						variant: variant(index),
						guests,
						dropoutKey: context.dropoutKey,
						tokens: tokens.rows(starts[index]!, lengths[index]!),
						pooled: pooledLinks(this.parts.pooled, chunk),
						training,
						observe: observe && ((name, value) => observe(name, value, index)),
						...listen(index),
					},
				),
			expected: ({ from }, index) =>
				from.module === shape.pipeline
					? [lengths[index]! / model.parallel.tokens.size]
					: samplesFrom(edges.find((one) => one.from.module === from.module)!.edge, microbatches[index]!, index),
		};
	}
}

interface Common extends Pick<GuestStep, "microbatches" | "features" | "training" | "variant"> {
	readonly guests: readonly StepGuest[];
	readonly context: StepContext;
	readonly observe: MicrobatchObserver | undefined;
	readonly listen: (microbatch: number) => { readonly onGradient?: (parameter: Parameter) => void };
}

/** The answer of the first guest that has one; null: as without guests. */
function firstOf<Answer>(
	guests: readonly StepGuest[],
	ask: (guest: StepGuest) => Answer | null | undefined,
): Answer | null {
	for (const guest of guests) {
		const answer = ask(guest);
		if (answer) return answer;
	}
	return null;
}

function encodingOf(guests: readonly StepGuest[], encoder: EncoderModule, microbatch: number): EncodeImages | null {
	return firstOf(guests, (guest) => guest.encode?.(encoder, microbatch));
}

/** Rows of the stream that the stage before sends of `images`. */
function streamRows({ config: { tower } }: EncoderModule, { grids }: PlacedImages): number {
	return grids.reduce((sum, grid) => sum + tower.stream!.rowsOf(grid), 0);
}

function disposing(guests: readonly StepGuest[]): Disposable {
	return {
		[Symbol.dispose]() {
			for (const guest of guests) guest[Symbol.dispose]?.();
		},
	};
}

/** Samples of a microbatch by the source of the edge that their rows come from. */
function samplesFrom(edge: Edge, { text }: ImageTextMicrobatch, index: number): number[] {
	return samplesOfShares(sampleLengths(text).length, edge.sources, index);
}
