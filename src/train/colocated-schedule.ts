/** Both modules in one process: encoder forward → language model forward and backward → encoder backward. */
import type { ImageSet } from "../data/images.ts";
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { EncoderModule } from "../models/mimo/encoder.ts";
import { EncoderMicrobatch } from "./encoder-microbatch.ts";
import { trainTextWithImages } from "./language-microbatch.ts";
import type { LossAccumulator } from "./loss.ts";
import type { MicrobatchObserver, Schedule, StepPlace } from "./schedule.ts";

/** What a model with an encoder trains on at once. */
export interface ImageTextMicrobatch {
	/** Ids hold the image token wherever an image row belongs. */
	readonly text: Microbatch;
	readonly images: ImageSet;
}

/** Observes the encoder's values as "encoder.…", the language model's under their own names. */
export class ColocatedSchedule implements Schedule<ImageTextMicrobatch> {
	constructor(
		readonly encoder: EncoderModule,
		readonly language: HybridModel,
		readonly imageTokenId: number,
	) {}

	run(
		microbatches: readonly ImageTextMicrobatch[],
		place: StepPlace,
		losses: LossAccumulator,
		observe: MicrobatchObserver = () => {},
	): void {
		let { firstToken } = place;
		let firstImage = 0;
		for (const [index, { text, images }] of microbatches.entries()) {
			const encoderPlace = { cropKey: place.dropoutKey, firstImage };
			using encoded = new EncoderMicrobatch(this.encoder, images, encoderPlace, {
				training: true,
				observe: (name, value) => observe(`encoder.${name}`, value, index),
			});
			const gradient = trainTextWithImages(
				this.language,
				{ text, imageTokenId: this.imageTokenId, name: `microbatch ${index}` },
				encoded,
				{ ...place, firstToken },
				losses,
				(name, value) => observe(name, value, index),
			);
			if (gradient) encoded.backward(gradient);
			firstToken += text.ids.length;
			firstImage += images.grids.length;
		}
	}
}
