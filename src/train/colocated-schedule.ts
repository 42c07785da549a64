/** Both modules in one process: encoder forward → language model forward and backward → encoder backward. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { EncoderModule } from "../models/mimo/encoder.ts";
import { timed } from "../observe/timers.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { EncoderMicrobatch, notTrained } from "./encoder-microbatch.ts";
import { type DecodingLimits, decodeGreedily, splitIds } from "./generate.ts";
import { evaluateTextWithImages, trainTextWithImages } from "./language-microbatch.ts";
import type { LossAccumulator } from "./loss.ts";
import type { Decoder, Evaluator, MicrobatchObserver, Schedule, StepPlace } from "./schedule.ts";

/** Observes the encoder's values as "encoder.…", the language model's under their own names. */
export class ColocatedSchedule
	implements Schedule<ImageTextMicrobatch>, Evaluator<ImageTextMicrobatch>, Decoder<ImageTextMicrobatch>
{
	constructor(
		readonly encoder: EncoderModule,
		readonly language: HybridModel,
		readonly imageTokenId: number,
		/** Whether gradients go back into the encoder. */
		readonly encoderTrains = true,
	) {}

	run(
		microbatches: readonly ImageTextMicrobatch[],
		place: StepPlace,
		losses: LossAccumulator,
		observe: MicrobatchObserver = () => {},
	): void {
		const { timers } = place;
		let { firstToken } = place;
		let firstImage = 0;
		for (const [index, { text, images }] of microbatches.entries()) {
			if (images.grids.length > 0) losses.sawImages = true;
			const encoderPlace = { cropKey: place.dropoutKey, firstImage };
			const encoderOptions = {
				training: this.encoderTrains,
				observe: (name: string, value: Tensor) => observe(`encoder.${name}`, value, index),
			};
			using encoded = timed(
				timers,
				"forward-compute",
				() => new EncoderMicrobatch(this.encoder, images, encoderPlace, encoderOptions),
			);
			const gradient = trainTextWithImages(
				this.language,
				{ text, imageTokenId: this.imageTokenId, name: `microbatch ${index}` },
				encoded,
				{ dropoutKey: place.dropoutKey, firstToken, timers },
				losses,
				(name, value) => observe(name, value, index),
			);
			if (gradient) timed(timers, "backward-compute", () => encoded.backward(gradient));
			firstToken += text.ids.length;
			firstImage += images.grids.length;
		}
	}

	evaluate(
		microbatches: readonly ImageTextMicrobatch[],
		losses: LossAccumulator,
		observe: MicrobatchObserver = () => {},
	): void {
		for (const [index, { text, images }] of microbatches.entries()) {
			using encoded = new EncoderMicrobatch(this.encoder, images, notTrained, {
				training: false,
				observe: (name, value) => observe(`encoder.${name}`, value, index),
			});
			evaluateTextWithImages(
				this.language,
				{ text, imageTokenId: this.imageTokenId, name: `microbatch ${index}` },
				encoded,
				losses,
				(name, value) => observe(name, value, index),
			);
		}
	}

	decode(prompts: readonly ImageTextMicrobatch[], limits: DecodingLimits): number[][] {
		return prompts.flatMap(({ text, images }) => {
			using encoded = new EncoderMicrobatch(this.encoder, images, notTrained, { training: false });
			const { rows } = encoded;
			return decodeGreedily(this.language, { ids: splitIds(text), rows, imageTokenId: this.imageTokenId }, limits);
		});
	}
}
