/**
 * Resizing and normalising as torchvision does on 8-bit values, which transformers' processors of Qwen-VL, InternVL and SigLIP call
 * (docs/spec/vision.md §5.6): bit for bit its pixels and values.
 */
import type { ChannelStatistics, Image, ImageSize } from "../../native/images.ts";

/** Weights of an axis as integers: of every output those of the inputs from `first` on, `longest` places each. */
interface Taps {
	readonly first: Int32Array;
	readonly count: Int32Array;
	readonly longest: number;
	readonly weight: Int32Array;
	/** Sums of products are divided by 2 to this. */
	readonly precision: number;
}

const mostPrecision = 22;

/** Keys' kernel of a = −1/2. */
function cubic(x: number): number {
	const d = Math.abs(x);
	if (d < 1) return (1.5 * d - 2.5) * d * d + 1;
	return d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
}

function tapsOf(from: number, to: number): Taps {
	const scale = from / to;
	const widened = Math.max(scale, 1);
	const support = 2 * widened;
	const longest = 2 * Math.ceil(support) + 1;
	const [first, count] = [new Int32Array(to), new Int32Array(to)];
	const exact = new Float64Array(to * longest);
	for (let o = 0; o < to; o++) {
		const centre = scale * (o + 0.5);
		first[o] = Math.max(Math.trunc(centre - support + 0.5), 0);
		count[o] = Math.min(Math.trunc(centre + support + 0.5), from) - first[o]!;
		const own = exact.subarray(o * longest, o * longest + count[o]!);
		for (let k = 0; k < own.length; k++) own[k] = cubic((first[o]! + k - centre + 0.5) / widened);
		const sum = own.reduce((all, weight) => all + weight, 0);
		for (let k = 0; k < own.length; k++) own[k]! /= sum;
	}
	const largest = exact.reduce((most, weight) => Math.max(most, weight), 0);
	let precision = 0;
	while (precision < mostPrecision && Math.trunc(0.5 + largest * 2 ** (precision + 1)) < 2 ** 15) precision++;
	const weight = Int32Array.from(exact, (w) => Math.trunc(w * 2 ** precision + (w < 0 ? -0.5 : 0.5)));
	return { first, count, longest, weight, precision };
}

/** Bicubic with antialiasing, the width first, each axis rounded to 8 bits. An axis of equal size is left alone. */
export function resizeAsTorchvision(image: Image, size: ImageSize): Image {
	return alongHeight(alongWidth(image, size.width), size.height);
}

function alongWidth(image: Image, to: number): Image {
	const { width, height, channels, pixels } = image;
	if (width === to) return image;
	const { first, count, longest, weight, precision } = tapsOf(width, to);
	const resized = new Uint8ClampedArray(to * height * channels);
	const half = 1 << (precision - 1);
	for (let y = 0, at = 0; y < height; y++) {
		for (let x = 0; x < to; x++) {
			const begin = (y * width + first[x]!) * channels;
			for (let channel = 0; channel < channels; channel++) {
				let sum = half;
				for (let k = 0, p = begin + channel; k < count[x]!; k++, p += channels)
					sum += pixels[p]! * weight[x * longest + k]!;
				resized[at++] = sum >> precision;
			}
		}
	}
	return { width: to, height, channels, pixels: new Uint8Array(resized.buffer) };
}

function alongHeight(image: Image, to: number): Image {
	const { width, height, channels, pixels } = image;
	if (height === to) return image;
	const { first, count, longest, weight, precision } = tapsOf(height, to);
	const row = width * channels;
	const resized = new Uint8ClampedArray(row * to);
	const sums = new Int32Array(row);
	for (let y = 0; y < to; y++) {
		sums.fill(1 << (precision - 1));
		for (let k = 0; k < count[y]!; k++) {
			const [from, own] = [(first[y]! + k) * row, weight[y * longest + k]!];
			for (let x = 0; x < row; x++) sums[x]! += pixels[from + x]! * own;
		}
		for (let x = 0; x < row; x++) resized[y * row + x] = sums[x]! >> precision;
	}
	return { width, height: to, channels, pixels: new Uint8Array(resized.buffer) };
}

const f32 = Math.fround;

/**
 * Patches of an RGB image, row by row, channel by channel: (v − 255 mean)/(255 deviation) in fp32, each product and the quotient
 * rounded. Pixels that make no whole patch are left out at the right and at the bottom.
 */
export function patchesAsTorchvision(
	image: Image,
	patch: number,
	{ mean, deviation }: ChannelStatistics,
): Float32Array {
	const { width, height, pixels } = image;
	const values = mean.map((average, channel) => {
		const [middle, spread] = [f32(f32(average) * 255), f32(f32(deviation[channel]!) * 255)];
		return Float32Array.from({ length: 256 }, (_, v) => f32(v - middle) / spread);
	});
	const patches = new Float32Array(3 * (height - (height % patch)) * (width - (width % patch)));
	let at = 0;
	for (let top = 0; top + patch <= height; top += patch) {
		for (let left = 0; left + patch <= width; left += patch) {
			for (const [channel, table] of values.entries()) {
				for (let y = top; y < top + patch; y++) {
					for (let x = left; x < left + patch; x++) patches[at++] = table[pixels[3 * (y * width + x) + channel]!]!;
				}
			}
		}
	}
	return patches;
}
