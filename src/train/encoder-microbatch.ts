/**
 * One microbatch on the encoder's side: forward on its own tape → rows, kept until their gradient comes back from the
 * language model, in the same process or over the bridge.
 */
import type { ImageSet } from "../data/images.ts";
import type { EncodedFeatures, EncoderModule } from "../models/mimo/encoder.ts";
import { patchWidth } from "../models/radio/config.ts";
import type { RadioObserver } from "../models/radio/model.ts";
import { Tape } from "../tensor/tape.ts";
import { Tensor } from "../tensor/tensor.ts";
import type { StepPlace } from "./schedule.ts";

export interface EncoderPlace {
	/** Key of this step's random crops. */
	readonly cropKey: number;
	/** Place of image 0 among those of the step's global batch, where the images do not say their own. */
	readonly firstImage: number;
}

/** No crops are drawn where nothing trains. */
export const notTrained: EncoderPlace = { cropKey: 0, firstImage: 0 };

/** Patches of all images on the device, [Σ rows · columns, 3p²] in the encoder's type. */
export function patchTensor({ device, config }: EncoderModule, { patches }: ImageSet): Tensor {
	const width = patchWidth(config.tower);
	return Tensor.from(device, patches, [patches.length / width, width], { dtype: config.tower.dtype });
}

export class EncoderMicrobatch implements Disposable {
	readonly #tape: Tape;
	/** All image rows, [Σ, H]. */
	readonly rows: Tensor;
	readonly rowsPerSample: readonly number[];

	/** Runs the encoder forward. training: whether gradients will come. */
	constructor(
		readonly encoder: EncoderModule,
		images: ImageSet,
		place: EncoderPlace,
		options: {
			readonly training: boolean;
			readonly observe?: RadioObserver;
			/** What a frozen tower made of the images ahead of time; stays the caller's. */
			readonly features?: EncodedFeatures;
		} & Pick<StepPlace, "onGradient">,
	) {
		const { device } = encoder;
		const { onGradient, features, observe } = options;
		this.#tape = new Tape(device, { recording: options.training, ...(onGradient && { onGradient }) });
		using patches = features ? null : patchTensor(encoder, images);
		const { grids, indices = grids.map((_, index) => place.firstImage + index) } = images;
		const { rows, rowsPerImage } = features
			? encoder.project(this.#tape, features, observe)
			: encoder.forward(this.#tape, { patches: patches!, grids, indices, cropKey: place.cropKey }, observe);
		this.rows = rows;
		let image = 0;
		this.rowsPerSample = images.imagesPerSample.map((count) => {
			const own = rowsPerImage.slice(image, image + count);
			image += count;
			return own.reduce((sum, value) => sum + value, 0);
		});
		if (image !== rowsPerImage.length) {
			throw new RangeError(
				`${rowsPerImage.length} images do not belong to samples of ${images.imagesPerSample} images.`,
			);
		}
	}

	/** Whether the rows have a way back. */
	get wantsGradient(): boolean {
		return this.rows.gradient !== null;
	}

	/** Gradients of the encoder from that of its rows, [Σ, H]; takes it over. */
	backward(gradient: Tensor): void {
		if (this.rows.gradient) this.rows.gradient.accumulate(gradient);
		else gradient[Symbol.dispose]();
		this.#tape.backward();
	}

	[Symbol.dispose](): void {
		this.#tape.discard();
		this.rows[Symbol.dispose]();
	}
}
