/**
 * Pictures of one to four handwritten digits beside each other on canvases of varying size, and captions that spell them
 * out: "seven two one". Picture n of a set follows from the set's seed and n.
 */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { MersenneTwister, seedByInteger } from "../../src/data/energon/random/mersenne-twister.ts";

/** The digits themselves: side × side bytes each, 255 is ink. */
export interface Digits {
	readonly labels: Uint8Array;
	readonly pixels: Uint8Array;
}

export interface Picture {
	readonly height: number;
	readonly width: number;
	/** Bytes row by row. */
	readonly pixels: Uint8Array;
	readonly caption: string;
}

/** Pixels of a digit's side. */
const side = 28;
/** Pixels that heights and widths are multiples of. */
const unit = 16;
/** A digit's square on the canvas. */
const cell = unit * Math.ceil(side / unit);

const words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
/** Numbers of digits a picture may have, as often as they are drawn: short ones, which teach most, more often. */
const lengths = [1, 1, 1, 1, 2, 2, 2, 3, 3, 4];

/** MNIST's digits in its IDX files: those to train on ("train"), or those it keeps apart ("t10k"). */
export function readDigits(folder: string, part: "train" | "t10k"): Digits {
	const labels = readIdx(join(folder, `${part}-labels-idx1-ubyte`), 1);
	const pixels = readIdx(join(folder, `${part}-images-idx3-ubyte`), 3);
	if (pixels.length !== labels.length * side ** 2) {
		throw new Error(`${folder}: ${labels.length} labels of ${part}, but ${pixels.length} pixels.`);
	}
	return { labels, pixels };
}

/** Bytes of an IDX file after its big-endian header: 0x0800 + dimensions, then the size of each. */
function readIdx(path: string, dimensions: number): Uint8Array {
	const bytes = readFileSync(path);
	if (bytes.readUInt32BE(0) !== 0x0800 + dimensions) {
		throw new Error(`${path} is not an IDX file of unsigned bytes in ${dimensions} dimensions.`);
	}
	return bytes.subarray(4 + 4 * dimensions);
}

/** Picture `number` of a set. */
export function drawPicture({ labels, pixels: ink }: Digits, seed: number, number: number): Picture {
	const random = new MersenneTwister(seedByInteger(seed + number));
	const below = (limit: number) => random.u32() % limit;
	const chosen = Array.from({ length: lengths[below(lengths.length)]! }, () => below(labels.length));
	// Every digit has some freedom in its cell; some canvases are a unit larger.
	const size = (cells: number) => cells * cell + (below(4) === 0 ? unit : 0);
	const [height, width] = [size(1), size(chosen.length)];
	const [top, left] = [unit * below((height - cell) / unit + 1), unit * below((width % cell) / unit + 1)];
	const pixels = new Uint8Array(height * width);
	for (const [index, digit] of chosen.entries()) {
		const [y, x] = [top + below(cell - side + 1), left + index * cell + below(cell - side + 1)];
		for (let row = 0; row < side; row++) {
			const from = (digit * side + row) * side;
			pixels.set(ink.subarray(from, from + side), (y + row) * width + x);
		}
	}
	return { height, width, pixels, caption: chosen.map((digit) => words[labels[digit]!]).join(" ") };
}
