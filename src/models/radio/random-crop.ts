/**
 * The window of the position table an image is trained on (docs/spec/vision.md §1.4): drawn from Philox 4x32-10 with
 * the image's number in the step's global batch as counter, so that no layout changes it.
 */
import { philoxKey } from "../initialise.ts";
import type { PositionCrop } from "./positions.ts";

const f32 = Math.fround;
const smallestScale = Math.sqrt(0.1);
const [lowAspect, highAspect] = [Math.log(3 / 4), Math.log(4 / 3)];

/** Four 32-bit words of counter (counter, 0, 0) under a 64-bit key: Philox 4x32 of ten rounds (Salmon et al., 2011). */
export function philox4x32(key: bigint, counter: number): [number, number, number, number] {
	let [a, b, c, d] = [counter >>> 0, Math.floor(counter / 2 ** 32), 0, 0];
	let [low, high] = [Number(BigInt.asUintN(32, key)), Number(BigInt.asUintN(32, key >> 32n))];
	for (let round = 0; round < 10; round++) {
		const first = BigInt(a) * 0xd2511f53n;
		const second = BigInt(c) * 0xcd9e8d57n;
		const upper = (product: bigint) => Number(product >> 32n);
		const lower = (product: bigint) => Number(product & 0xffffffffn);
		[a, b, c, d] = [(upper(second) ^ b ^ low) >>> 0, lower(second), (upper(first) ^ d ^ high) >>> 0, lower(first)];
		low = (low + 0x9e3779b9) >>> 0;
		high = (high + 0xbb67ae85) >>> 0;
	}
	return [a, b, c, d];
}

/** Scale, aspect and offset uniform as upstream draws them; `image`: its number there. */
export function cropOfImage(stepKey: number, image: number): PositionCrop {
	const words = philox4x32(philoxKey(stepKey, "position_crop"), image);
	const [scale, aspect, alongX, alongY] = words.map((word) => (word >>> 8) / 2 ** 24) as [
		number,
		number,
		number,
		number,
	];
	const z = f32(smallestScale + scale * (1 - smallestScale));
	const ratio = f32(Math.exp(lowAspect + aspect * (highAspect - lowAspect)));
	const width = Math.min(1, f32(z * ratio));
	const height = Math.min(1, f32(z / ratio));
	return { x: f32(alongX * f32(1 - width)), y: f32(alongY * f32(1 - height)), width, height };
}
