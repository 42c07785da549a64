/** Images in host memory: decoding, resizing as Pillow does it, normalising. No device; any thread may use them. */
import { Status } from "./abi.ts";
import { NativeError, UserError } from "./errors.ts";
import type { Library } from "./library.ts";

/** 1 = grey, 3 = RGB, 4 = RGBA. */
export type Channels = 1 | 3 | 4;

/** Rows from the top, channels interleaved, 8 bits each. */
export interface Image {
	readonly width: number;
	readonly height: number;
	readonly channels: Channels;
	readonly pixels: Uint8Array;
}

export interface ImageSize {
	readonly width: number;
	readonly height: number;
}

/** Mean and standard deviation of the three channels, on values from 0 to 1. */
export interface ChannelStatistics {
	readonly mean: readonly [number, number, number];
	readonly deviation: readonly [number, number, number];
}

/** The statistics RADIO and CLIP were trained with (vision.md §5.4). */
export const clipStatistics: ChannelStatistics = {
	mean: [0.48145466, 0.4578275, 0.40821073],
	deviation: [0.26862954, 0.26130258, 0.27577711],
};

export class Images {
	constructor(private readonly library: Library) {}

	/** Size and channels of a JPEG or PNG file; throws a UserError when it is damaged or of another kind. */
	inspect(file: Uint8Array): ImageSize & { readonly channels: number } {
		const size = new Int32Array(3);
		this.#call("mimo_image_inspect", file, file.length, size);
		return { width: size[0]!, height: size[1]!, channels: size[2]! };
	}

	/** Decodes a JPEG or PNG file; throws a UserError when it is damaged, cut off or of another kind. */
	decode(file: Uint8Array, channels: Channels = 3): Image {
		const { width, height } = this.inspect(file);
		const pixels = new Uint8Array(width * height * channels);
		this.#call("mimo_image_decode", file, file.length, channels, pixels, pixels.length);
		return { width, height, channels, pixels };
	}

	/** Bicubic with antialiasing, pixel for pixel Pillow's (vision.md §5.4, golden G13). */
	resize(image: Image, { width, height }: ImageSize): Image {
		const { channels } = image;
		checkPixels(image);
		const pixels = new Uint8Array(width * height * channels);
		const { width: from, height: rows } = image;
		this.#call("mimo_image_resize", image.pixels, from, rows, channels, pixels, width, height);
		return { width, height, channels, pixels };
	}

	/** RGB pixels as normalised planes [3, height, width]. */
	planes(image: Image, statistics: ChannelStatistics): Float32Array {
		return this.#normalize(image, 0, statistics);
	}

	/** RGB pixels as normalised patch vectors [patches, 3 · patch²], channel first, row-major patches (vision.md §2.1). */
	patches(image: Image, patch: number, statistics: ChannelStatistics): Float32Array {
		return this.#normalize(image, patch, statistics);
	}

	#normalize(image: Image, patch: number, { mean, deviation }: ChannelStatistics): Float32Array {
		checkPixels(image);
		if (image.channels !== 3)
			throw new RangeError(`An image with ${image.channels} channels is to be normalised as RGB.`);
		const values = new Float32Array(image.pixels.length);
		const statistics = Float32Array.of(...mean, ...deviation);
		this.#call("mimo_image_normalize", image.pixels, image.width, image.height, patch, statistics, values);
		return values;
	}

	#call(name: string, ...args: (number | NodeJS.TypedArray)[]): void {
		const status = this.library.symbols[name]!(...args) as number;
		if (status === Status.ok) return;
		const sentence = String(this.library.symbols.mimo_last_error!());
		if (status === Status.data) throw new UserError(sentence);
		throw new NativeError(name, status, sentence);
	}
}

function checkPixels({ width, height, channels, pixels }: Image): void {
	if (pixels.length !== width * height * channels) {
		throw new RangeError(`An image of ${width} x ${height} x ${channels} has ${pixels.length} bytes.`);
	}
}
