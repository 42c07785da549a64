/** Images in host memory: decoding, resizing as Pillow does it, normalising. No device; any thread may use them. */

import { NativeError, UserError } from "../system/errors.ts";
import { ImageDecoding, type ImageDecodingName, Status } from "./abi.ts";
import type { Library } from "./library.ts";

/** Kinds of image files, as the library numbers them. */
export const imageFormats = ["JPEG", "PNG", "WebP", "GIF", "BMP"] as const;
export type ImageFormat = (typeof imageFormats)[number];

/** An image of a kind that Pillow reads and `mimo` does not; the sentence says which. */
export class UnreadImageError extends UserError {}

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

/** The content of an image file's header; the size is that of the pixels as they are stored. */
export interface ImageHeader extends ImageSize {
	readonly format: ImageFormat;
	/** EXIF's orientation, 1 (upright) to 8; from 5 on the picture is shown with its sides exchanged. */
	readonly orientation: number;
	/** Whether it holds greys of 16 bits, of which Pillow makes white whatever is above 255. */
	readonly grey16: boolean;
	/** As the file has them: 1 grey or palette, 2 grey and alpha, 3 RGB, 4 RGBA or CMYK. */
	readonly channels: number;
}

/** Mean and standard deviation of the three channels, on values from 0 to 1. */
export interface ChannelStatistics {
	readonly mean: readonly [number, number, number];
	readonly deviation: readonly [number, number, number];
}

/** The statistics RADIO and CLIP were trained with (docs/spec/vision.md §5.4). */
export const clipStatistics: ChannelStatistics = {
	mean: [0.48145466, 0.4578275, 0.40821073],
	deviation: [0.26862954, 0.26130258, 0.27577711],
};

export class Images {
	constructor(private readonly library: Library) {}

	/** Bounds the memory of images that threads of this process decode at the same time; one that takes more is decoded alone. */
	boundMemory(bytes: number): void {
		this.#call("mimo_image_memory", bytes);
	}

	/**
	 * Reads the header of an image file, without decoding it. Throws a UserError when it is damaged or too large, an
	 * UnreadImageError when it is of a kind that is not read.
	 */
	inspect(file: Uint8Array): ImageHeader {
		const header = new Int32Array(6);
		this.#call("mimo_image_inspect", file, file.length, header);
		const [width, height, channels, format, orientation, grey16] = header;
		return {
			...{ width: width!, height: height!, channels: channels!, format: imageFormats[format!]! },
			...{ orientation: orientation!, grey16: grey16 === 1 },
		};
	}

	/** Decodes an image file as Pillow converts it to "L", "RGB" or "RGBA"; throws what `inspect` throws. */
	decode(file: Uint8Array, channels: Channels = 3): Image {
		const { width, height } = this.inspect(file);
		const pixels = new Uint8Array(width * height * channels);
		this.#call("mimo_image_decode", file, file.length, channels, pixels, pixels.length);
		return { width, height, channels, pixels };
	}

	/**
	 * Decodes an image file once, and resizes it to each size by Pillow's bicubic filter; RGB. Energon's decoding resizes an
	 * image of its kind (nearest with a palette, weighted by alpha) and converts the result; transformers' resizes RGB, made
	 * upright and on white. Throws what `inspect` throws.
	 */
	decodeResized(file: Uint8Array, sizes: readonly ImageSize[], decoding: ImageDecodingName): Image[] {
		const pixels = new Uint8Array(sizes.reduce((bytes, { width, height }) => bytes + width * height * 3, 0));
		const pairs = Int32Array.from(sizes.flatMap(({ width, height }) => [width, height]));
		const way = ImageDecoding[decoding];
		this.#call("mimo_image_decode_resized", file, file.length, way, pairs, sizes.length, pixels, pixels.length);
		let end = 0;
		return sizes.map(({ width, height }) => {
			const begin = end;
			end += width * height * 3;
			return { width, height, channels: 3, pixels: pixels.subarray(begin, end) };
		});
	}

	/**
	 * The patch vectors of an image file in transformers' decoding, resized in fp32 without rounding or clamping, as its
	 * processor of Nemotron models does; otherwise as `patches`. Throws what `inspect` throws.
	 */
	decodePatches(file: Uint8Array, size: ImageSize, patch: number, statistics: ChannelStatistics): Float32Array {
		const { width, height } = size;
		if (width % patch !== 0 || height % patch !== 0) {
			throw new RangeError(`An image of ${width} x ${height} is not made of patches of ${patch}.`);
		}
		const values = new Float32Array(3 * width * height);
		const { mean, deviation } = statistics;
		const six = Float32Array.of(...mean, ...deviation);
		this.#call("mimo_image_decode_patches", file, file.length, width, height, patch, six, values);
		return values;
	}

	/** Bicubic with antialiasing, byte for byte Pillow 13's; colours are weighted by alpha where there is one. */
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

	/**
	 * RGB pixels as normalised patch vectors [patches, 3 · patch²], channel first, row-major patches
	 * (docs/spec/vision.md §2.1).
	 */
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
		if (status === Status.unsupported) throw new UnreadImageError(sentence);
		throw new NativeError(name, status, sentence);
	}
}

function checkPixels({ width, height, channels, pixels }: Image): void {
	if (pixels.length !== width * height * channels) {
		throw new RangeError(`An image of ${width} x ${height} x ${channels} has ${pixels.length} bytes.`);
	}
}
