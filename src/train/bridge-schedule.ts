/**
 * The step's passes where encoder and language model run on different ranks (spec runtime 3.2): the encoder is two
 * microbatches ahead (upstream: one), so that both sides work at the same time, each transfer hides behind a pass, and a
 * pass that takes longer than usual is made up for. With equal work on both sides M microbatches then take M + 1 times
 * that of one: until the first rows come, and after the last gradient, one side has nothing to do.
 *
 *   encoder    F0 → F1 → F2 → ←0 B0 F3 → ←1 B1 …            → sends rows, ← receives their gradient
 *   language      ←0 F0 B0 →0 ←1 F1 B1 →1 …
 */
import type { ImageSet } from "../data/images.ts";
import { type Microbatch, sampleLengths } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { EncoderModule } from "../models/mimo/encoder.ts";
import { type StepTimers, timed } from "../observe/timers.ts";
import { type BridgeDestination, type BridgeSource, microbatchesAhead } from "../parallel/bridge.ts";
import { EncoderMicrobatch, notTrained } from "./encoder-microbatch.ts";
import type { FeaturePrefetch } from "./feature-prefetch.ts";
import { type DecodingLimits, decodeGreedily, splitIds } from "./generate.ts";
import { evaluateTextWithImages, trainTextWithImages } from "./language-microbatch.ts";
import type { LossAccumulator } from "./loss.ts";
import {
	type Decoder,
	type Evaluator,
	gradientListener,
	type MicrobatchObserver,
	type Schedule,
	type StepPlace,
} from "./schedule.ts";

/** An encoder rank. Its microbatches hold the images of all language lanes it serves, in lane order. */
export class EncoderSchedule implements Schedule<ImageSet>, Evaluator<ImageSet>, Decoder<ImageSet> {
	#upcoming: readonly ImageSet[] = [];

	constructor(
		readonly encoder: EncoderModule,
		readonly bridge: BridgeSource,
		/** Whether gradients come back. */
		readonly trains: boolean,
		/** Runs a frozen tower ahead; null: every microbatch in its turn. */
		readonly prefetch: FeaturePrefetch | null = null,
	) {}

	/** Microbatches of the next step, which a prefetch may begin with. */
	expect(upcoming: readonly ImageSet[]): void {
		this.#upcoming = upcoming;
	}

	run(
		microbatches: readonly ImageSet[],
		place: StepPlace,
		losses: LossAccumulator,
		observe: MicrobatchObserver = () => {},
	): void {
		const { timers } = place;
		const waiting: EncoderMicrobatch[] = [];
		let firstImage = 0;
		this.prefetch?.announce([...microbatches, ...this.#upcoming]);
		for (const [index, images] of microbatches.entries()) {
			if (images.grids.length > 0) losses.sawImages = true;
			timers?.start("forward-compute");
			const ready = images.grids.length > 0 ? this.prefetch?.take(images) : undefined;
			using _features = ready?.features;
			const encoded = new EncoderMicrobatch(
				this.encoder,
				images,
				{ cropKey: place.dropoutKey, firstImage },
				{
					training: this.trains,
					observe: (name, value) => observe(`encoder.${name}`, value, index),
					...gradientListener(place, index, microbatches.length),
					...(ready && { features: ready }),
				},
			);
			timers?.stop("forward-compute");
			firstImage += images.grids.length;
			timed(timers, "forward-send", () => this.bridge.sendForward(encoded, this.trains));
			waiting.push(encoded);
			if (waiting.length > microbatchesAhead) this.#backward(waiting.shift()!, timers);
		}
		for (const encoded of waiting) this.#backward(encoded, timers);
		timed(timers, "forward-send", () => this.bridge.settle());
	}

	evaluate(microbatches: readonly ImageSet[], _losses: LossAccumulator, observe: MicrobatchObserver = () => {}): void {
		for (const [index, images] of microbatches.entries()) {
			using encoded = new EncoderMicrobatch(this.encoder, images, notTrained, {
				training: false,
				observe: (name, value) => observe(`encoder.${name}`, value, index),
			});
			this.bridge.sendForward(encoded, false);
		}
		this.bridge.settle();
	}

	/** Sends the images' rows; what follows them is known on the language ranks. */
	decode(prompts: readonly ImageSet[]): number[][] {
		for (const images of prompts) {
			using encoded = new EncoderMicrobatch(this.encoder, images, notTrained, { training: false });
			this.bridge.sendForward(encoded, false);
		}
		this.bridge.settle();
		return [];
	}

	#backward(microbatch: EncoderMicrobatch, timers: StepTimers | undefined): void {
		using encoded = microbatch;
		// The gradient is on its way: time for images to come.
		timed(timers, "forward-compute", () => this.prefetch?.fill());
		if (!this.trains) return;
		const gradient = timed(timers, "backward-recv", () => this.bridge.receiveBackward(encoded.rows.rows));
		timed(timers, "backward-compute", () => encoded.backward(gradient));
	}
}

/** A language rank that receives image rows. */
export class BridgedLanguageSchedule implements Schedule<Microbatch>, Evaluator<Microbatch>, Decoder<Microbatch> {
	constructor(
		readonly model: HybridModel,
		readonly bridge: BridgeDestination,
		readonly imageTokenId: number,
		/** Whether the encoder trains and wants gradients. */
		readonly encoderTrains: boolean,
	) {}

	run(
		microbatches: readonly Microbatch[],
		place: StepPlace,
		losses: LossAccumulator,
		observe: MicrobatchObserver = () => {},
	): void {
		const { timers } = place;
		let { firstToken } = place;
		for (const [index, text] of microbatches.entries()) {
			const received = timed(timers, "forward-recv", () =>
				this.bridge.receiveForward(sampleLengths(text).length, this.encoderTrains),
			);
			using rows = received.rows;
			const gradient = trainTextWithImages(
				this.model,
				{ text, imageTokenId: this.imageTokenId, name: `microbatch ${index}` },
				{ rows, rowsPerSample: received.rowsPerSample, wantsGradient: this.encoderTrains },
				{
					dropoutKey: place.dropoutKey,
					firstToken,
					timers,
					...gradientListener(place, index, microbatches.length),
				},
				losses,
				(name, value) => observe(name, value, index),
			);
			if (this.encoderTrains) timed(timers, "backward-send", () => this.bridge.sendBackward(gradient));
			gradient?.[Symbol.dispose]();
			firstToken += text.ids.length;
		}
		timed(timers, "backward-send", () => this.bridge.settle());
	}

	evaluate(microbatches: readonly Microbatch[], losses: LossAccumulator, observe: MicrobatchObserver = () => {}): void {
		for (const [index, text] of microbatches.entries()) {
			const received = this.bridge.receiveForward(sampleLengths(text).length, false);
			using rows = received.rows;
			evaluateTextWithImages(
				this.model,
				{ text, imageTokenId: this.imageTokenId, name: `microbatch ${index}` },
				{ rows, rowsPerSample: received.rowsPerSample },
				losses,
				(name, value) => observe(name, value, index),
			);
		}
	}

	decode(prompts: readonly Microbatch[], limits: DecodingLimits): number[][] {
		return prompts.flatMap((text) => {
			using rows = this.bridge.receiveForward(sampleLengths(text).length, false).rows;
			return decodeGreedily(this.model, { ids: splitIds(text), rows, imageTokenId: this.imageTokenId }, limits);
		});
	}
}
