/**
 * Pictures of one to four handwritten digits beside each other on canvases of varying size, and captions that spell them
 * out: "seven two one". Picture n of a set follows from the set's seed and n.
 */
import { join } from "node:path";
import { UserError } from "../../native/errors.ts";
import { MersenneTwister, seedByInteger } from "../energon/random/mersenne-twister.ts";
import { readIdx } from "./idx.ts";

/** The digits themselves: side × side bytes each, 255 is ink. */
export interface DigitImages {
	readonly side: number;
	readonly labels: Uint8Array;
	readonly pixels: Uint8Array;
}

export interface DigitPicture {
	readonly height: number;
	readonly width: number;
	/** Bytes row by row. */
	readonly pixels: Uint8Array;
	readonly caption: string;
	readonly digits: number;
}

const words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
/** Numbers of digits a picture may have, as often as they are drawn: short ones, which teach most, more often. */
const lengths = [1, 1, 1, 1, 2, 2, 2, 3, 3, 4];
const mostDigits = Math.max(...lengths);

/** MNIST's training digits, or those it keeps apart: no held-out picture shows a digit that training pictures do. */
export function readDigits(folder: string, part: "train" | "held out"): DigitImages {
	const prefix = join(folder, part === "train" ? "train" : "t10k");
	const images = readIdx(`${prefix}-images-idx3-ubyte`, 3);
	const labels = readIdx(`${prefix}-labels-idx1-ubyte`, 1);
	const [count, rows, columns] = images.shape as [number, number, number];
	if (labels.values.length !== count || rows !== columns) {
		throw new UserError(
			`${prefix}-*: ${count} images of ${rows} × ${columns} do not go with ${labels.values.length} labels.`,
		);
	}
	return { side: rows, labels: labels.values, pixels: images.values };
}

/** Picture `number` of a set. Height and width are multiples of `unit` pixels. */
export function drawPicture(images: DigitImages, seed: number, number: number, unit: number): DigitPicture {
	const random = new MersenneTwister(seedByInteger(seed + number));
	const below = (limit: number) => random.u32() % limit;
	const chosen = Array.from({ length: lengths[below(lengths.length)]! }, () => below(images.labels.length));
	// Every digit has a square cell of its own and some freedom in it; some canvases are a unit larger.
	const { side } = images;
	const cell = unit * Math.ceil(side / unit);
	const size = (cells: number) => cells * cell + (below(4) === 0 ? unit : 0);
	const [height, width] = [size(1), size(chosen.length)];
	const [top, left] = [unit * below((height - cell) / unit + 1), unit * below((width % cell) / unit + 1)];
	const pixels = new Uint8Array(height * width);
	for (const [index, digit] of chosen.entries()) {
		const [y, x] = [top + below(cell - side + 1), left + index * cell + below(cell - side + 1)];
		for (let row = 0; row < side; row++) {
			const from = (digit * side + row) * side;
			pixels.set(images.pixels.subarray(from, from + side), (y + row) * width + x);
		}
	}
	const caption = chosen.map((digit) => words[images.labels[digit]!]).join(" ");
	return { height, width, pixels, caption, digits: chosen.length };
}

/** Height and width of the largest picture there may be, for digits of `side` pixels. */
export function largestPicture(side: number, unit: number): { readonly height: number; readonly width: number } {
	const cell = unit * Math.ceil(side / unit);
	return { height: cell + unit, width: mostDigits * cell + unit };
}

/** Light to dark. */
const shades = " .:-=+*#%@";

/** A picture in characters, one for two columns of four rows. */
export function drawAsText({ height, width, pixels }: DigitPicture): string[] {
	const shade = (row: number, column: number) => {
		let sum = 0;
		for (let y = row; y < row + 4; y++) for (let x = column; x < column + 2; x++) sum += pixels[y * width + x] ?? 0;
		return shades[Math.floor((sum / 8 / 256) * shades.length)]!;
	};
	return Array.from({ length: Math.ceil(height / 4) }, (_, line) =>
		Array.from({ length: Math.ceil(width / 2) }, (_, at) => shade(4 * line, 2 * at)).join(""),
	).map((line) => line.trimEnd());
}
