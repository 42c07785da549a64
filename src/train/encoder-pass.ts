/** One microbatch through the encoder: forward on its own tape → rows, kept until their gradient has come back. */
import type { ImageSet, PlacedImages } from "../data/images.ts";
import { outputRows, patchWidth } from "../models/radio/config.ts";
import type { RadioObserver } from "../models/radio/model.ts";
import type { EncodedFeatures, EncoderModule } from "../models/vision/encoder.ts";
import type { Rows } from "../parallel/edge.ts";
import type { Pass } from "../schedule/pass.ts";
import type { Parameter } from "../tensor/parameter.ts";
import { Tape, type WeightGradients } from "../tensor/tape.ts";
import { cast, Tensor } from "../tensor/tensor.ts";
import type { EncoderBalance } from "./encoder-balance.ts";

/** Arguments of a pass beside its images. */
export interface EncoderPassOptions {
	/** Key of this step's random crops. */
	readonly cropKey: number;
	/** Whether gradients will come. */
	readonly training: boolean;
	readonly observe?: RadioObserver | undefined;
	/** Features that a frozen tower made ahead of time; the pass takes them over. */
	readonly features?: EncodedFeatures | null;
	/** Lanes encode other images than they have read; absent or null: this one encodes its own. */
	readonly deal?: EncoderBalance | null;
	readonly onGradient?: (parameter: Parameter) => void;
}

/** Patches of all images on the device, [Σ rows · columns, 3p²] in the encoder's type. */
export function patchTensor({ device, config: { tower } }: EncoderModule, { patches, grids }: ImageSet): Tensor {
	const { dtype } = tower;
	const shape = [grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0), patchWidth(tower)];
	if (!device.counts) return Tensor.from(device, patches, shape, { dtype });
	// On a library that only counts there are no pixels: the tensor's size is all that is needed.
	const wide = Tensor.empty(device, shape, "f32", "data");
	if (dtype === "f32") return wide;
	using _wide = wide;
	return cast(wide, dtype, "data");
}

export class EncoderPass implements Pass {
	readonly #tape: Tape;
	/** All image rows, [Σ, H]. */
	readonly output: Rows;

	/** Runs the encoder forward. */
	constructor(
		readonly encoder: EncoderModule,
		images: PlacedImages,
		private readonly options: EncoderPassOptions,
	) {
		const { device } = encoder;
		const { onGradient } = options;
		this.#tape = new Tape(device, { recording: options.training, ...(onGradient && { onGradient }) });
		try {
			const rows = this.#encode(images);
			const rowsPerImage = images.grids.map((grid) => outputRows(encoder.config.tower, grid));
			this.output = { rows, rowsPerSample: rowsOfSamples(images, rowsPerImage) };
		} catch (error) {
			this.#tape.discard();
			throw error;
		}
	}

	/** Rows of `images`, in their order. */
	#encode(images: PlacedImages): Tensor {
		const { encoder, options } = this;
		const { observe, cropKey, features, deal } = options;
		if (features) {
			using _features = features.features;
			return encoder.project(this.#tape, features, observe).rows;
		}
		using patches = deal ? deal.exchangePatches(encoder, images) : patchTensor(encoder, images);
		const { grids, indices } = deal ?? images;
		const { rows } = encoder.forward(this.#tape, { patches, grids, indices, cropKey }, observe);
		if (!deal) return rows;
		using encoded = rows;
		return deal.returnRows(this.#tape, encoded);
	}

	/** Without images there is a way back all the same: every rank goes it. */
	get returns(): boolean {
		return this.options.training;
	}

	/** Done at once: the constructor has run the forward pass. */
	forward(): boolean {
		return true;
	}

	backward(gradient: Tensor | null, weightGradients: WeightGradients): null {
		const { gradient: slot } = this.output.rows;
		if (slot && gradient) slot.accumulate(gradient);
		else gradient?.[Symbol.dispose]();
		this.#tape.backward(weightGradients);
		return null;
	}

	computeWeightGradients(): void {
		this.#tape.drain();
	}

	[Symbol.dispose](): void {
		this.#tape.discard();
		this.output.rows[Symbol.dispose]();
	}
}

/** Rows of every sample from those of every image. */
function rowsOfSamples({ imagesPerSample }: ImageSet, rowsPerImage: readonly number[]): number[] {
	let image = 0;
	const rows = imagesPerSample.map((count) => {
		image += count;
		return rowsPerImage.slice(image - count, image).reduce((sum, value) => sum + value, 0);
	});
	if (image === rowsPerImage.length) return rows;
	throw new RangeError(`${rowsPerImage.length} images do not belong to samples of ${imagesPerSample} images.`);
}
