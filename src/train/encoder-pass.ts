/**
 * One microbatch's pass through the encoder. It runs on a tape of its own, which is kept until the gradient of its rows arrives.
 */
import type { ImageSet, PlacedImages } from "../data/images.ts";
import { outputRows, patchWidth } from "../models/radio/config.ts";
import type { RadioObserver } from "../models/radio/model.ts";
import type { EncodedFeatures, EncoderModule } from "../models/vision/encoder.ts";
import type { Rows } from "../parallel/index.ts";
import type { Pass } from "../schedule/pass.ts";
import { cast, type Parameter, Tape, Tensor, type WeightGradients } from "../tensor/index.ts";
import type { EncoderBalance } from "./encoder-balance.ts";

/** Options of an encoder pass. */
export interface EncoderPassOptions {
	/** Philox key of this step's random crops. */
	readonly cropKey: number;
	/** Whether a backward pass follows. */
	readonly training: boolean;
	readonly observe?: RadioObserver | undefined;
	/** Features that the frozen tower has computed ahead of time; the pass takes ownership. */
	readonly features?: EncodedFeatures | null;
	/**
	 * The assignment of images to lanes under --encoder-balance cost; absent or null: this lane encodes the images that it has
	 * read.
	 */
	readonly deal?: EncoderBalance | null;
	readonly onGradient?: (parameter: Parameter) => void;
}

/** Copies the patches of all images to the device: [Σ rows · columns, 3p²] in the encoder's dtype. */
export function patchTensor({ device, config: { tower } }: EncoderModule, { patches, grids }: ImageSet): Tensor {
	const { dtype } = tower;
	const shape = [grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0), patchWidth(tower)];
	if (!device.counts) return Tensor.from(device, patches, shape, { dtype });
	// A counting device has no values, and the data set no pixels: only the size matters.
	const wide = Tensor.empty(device, shape, "f32", "data");
	if (dtype === "f32") return wide;
	using _wide = wide;
	return cast(wide, dtype, "data");
}

export class EncoderPass implements Pass {
	readonly #tape: Tape;
	/** Encoded rows of all images, [Σ rows, H]. */
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

	/** Encodes `images`; rows in their order. */
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

	/** True without images too: the backward pass is a collective of all ranks. */
	get returns(): boolean {
		return this.options.training;
	}

	/** Always true: the constructor has run the whole forward pass. */
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
