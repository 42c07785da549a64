/**
 * One microbatch's pass through an encoder, or through a pipeline stage of it. It runs on a tape of its own, which is kept until the gradient of its rows arrives.
 */
import { type ImageSet, type PlacedImages, patchTensor } from "../data/images.ts";
import type { EncodeImages } from "../guests/guest.ts";
import type { EncoderObserver } from "../models/tower.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import type { Rows } from "../parallel/index.ts";
import type { Backward, Input, Pass } from "../schedule/pass.ts";
import { GradientSlot, type Parameter, Tape, type Tensor, type WeightGradients } from "../tensor/index.ts";

/** Options of an encoder pass. */
export interface EncoderPassOptions {
	/** Philox key of this step's random crops. */
	readonly cropKey: number;
	/** Whether a backward pass follows. */
	readonly training: boolean;
	readonly observe?: EncoderObserver | undefined;
	/** Replaces the encoding of the images that this rank has read; absent or null: the encoder runs on them. */
	readonly encode?: EncodeImages | null;
	readonly onGradient?: (parameter: Parameter) => void;
}

export class EncoderPass implements Pass {
	readonly #tape: Tape;
	/** Encoded rows of all images, [Σ rows, H], or the stream for the next stage. */
	readonly output: Rows;
	/** Gradient of the entered rows; null: not wanted. */
	readonly #slot: GradientSlot | null = null;

	/** Runs the encoder forward. `entered` (taken over): the stream of the stage before; null: the images' patches enter. */
	constructor(
		readonly encoder: EncoderModule,
		images: PlacedImages,
		private readonly options: EncoderPassOptions,
		private readonly entered: Pick<Input, "rows" | "returns"> | null = null,
	) {
		const { device } = encoder;
		const { onGradient, training } = options;
		this.#tape = new Tape(device, { recording: training, ...(onGradient && { onGradient }) });
		if (training && entered?.returns) {
			this.#slot = new GradientSlot(device, entered.rows.rows.shape, encoder.config.tower.dtype);
		}
		try {
			const rows = encoder.arrange(this.#tape, this.#encode(images), images.grids);
			const rowsPerImage = encoder.rowsPerItem(images.grids);
			this.output = { rows, rowsPerSample: encoder.segment.hasHead ? rowsOfSamples(images, rowsPerImage) : [] };
		} catch (error) {
			this.#tape.discard();
			entered?.rows.rows[Symbol.dispose]();
			throw error;
		}
	}

	/** Encodes `images`; rows in their order. */
	#encode(images: PlacedImages): Tensor {
		const { encoder, options, entered } = this;
		const { observe, cropKey, encode } = options;
		if (encode) return encode(this.#tape, images, { cropKey, observe });
		using patches =
			entered?.rows.rows.withGradient(this.#slot) ?? patchTensor(encoder.device, encoder.config.tower, images);
		const { grids, indices } = images;
		return encoder.forward(this.#tape, { patches, grids, indices, cropKey }, observe);
	}

	/** True without images too: the backward pass is a collective of all ranks. */
	get returns(): boolean {
		return this.options.training;
	}

	/** Always true: the constructor has run the whole forward pass. */
	forward(): boolean {
		return true;
	}

	backward(gradient: Tensor | null, weightGradients: WeightGradients): Backward {
		const { gradient: slot } = this.output.rows;
		if (slot && gradient) slot.accumulate(gradient);
		else gradient?.[Symbol.dispose]();
		this.#tape.backward(weightGradients);
		return { finished: true, gradients: [this.#slot?.take() ?? null] };
	}

	computeWeightGradients(): void {
		this.#tape.drain();
	}

	[Symbol.dispose](): void {
		this.#tape.discard();
		this.#slot?.clear();
		this.entered?.rows.rows[Symbol.dispose]();
		this.output.rows[Symbol.dispose]();
	}
}

/** Sums the rows of each sample's images. */
function rowsOfSamples({ imagesPerSample }: ImageSet, rowsPerImage: readonly number[]): number[] {
	let image = 0;
	const rows = imagesPerSample.map((count) => {
		image += count;
		return rowsPerImage.slice(image - count, image).reduce((sum, value) => sum + value, 0);
	});
	if (image === rowsPerImage.length) return rows;
	throw new RangeError(`${rowsPerImage.length} images do not belong to samples of ${imagesPerSample} images.`);
}
