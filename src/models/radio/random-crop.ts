/**
 * The window of the position table an image is trained on (docs/spec/vision.md §1.4): drawn from Philox 4x32-10 with
 * the image's number in the step's global batch as counter, so that no layout changes it.
 */
import { philoxKey } from "../initialise.ts";
import { philox4x32 } from "../philox.ts";
import type { PositionCrop } from "./positions.ts";

const f32 = Math.fround;
const smallestScale = Math.sqrt(0.1);
const [lowAspect, highAspect] = [Math.log(3 / 4), Math.log(4 / 3)];

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
