/** Digit pictures and their captions as microbatches: image tokens, then the caption's bytes and a line feed. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { outputRows } from "../../models/radio/config.ts";
import { UserError } from "../../native/errors.ts";
import { type ImageSet, joinImages, noImages, patchify } from "../images.ts";
import { type ImageTextMicrobatch, type Microbatch, noText } from "../microbatch.ts";
import { type DigitImages, type DigitPicture, drawPicture, largestPicture, readDigits } from "./pictures.ts";

/** Ends a caption. */
export const endOfCaption = 10;
/** Longest caption with its end: "three seven three seven" and the like. */
export const longestCaption = 24;

const ignored = -100;

/** CLIP's statistics, of red, green and blue (spec vision 5.4). */
const mean = [0.48145466, 0.4578275, 0.40821073];
const deviation = [0.26862954, 0.26130258, 0.27577711];

export class DigitData {
	readonly #images: DigitImages;
	/** Pixels that heights and widths are multiples of. */
	readonly #unit: number;

	constructor(
		readonly c: TrainingConfiguration,
		readonly part: "train" | "held out",
	) {
		this.#images = readDigits(c.dataPath!, part);
		this.#unit = c.patchDim * (c.pixelShuffle ? 2 : 1);
		const largest = largestPicture(this.#images.side, this.#unit);
		const rows = this.#tokens(largest);
		if (rows + longestCaption > c.seqLength) {
			throw new UserError(
				`seq-length is ${c.seqLength}, but the largest picture of digits makes ${rows} image tokens beside a caption of ${longestCaption} bytes.`,
			);
		}
		if (c.imageTokenId < 256 || c.vocabSize <= 256) {
			throw new UserError("Captions are bytes: image-token-id has to be at least 256, and vocab-size above 256.");
		}
	}

	picture(number: number): DigitPicture {
		return drawPicture(this.#images, this.c.seed, number, this.#unit);
	}

	/** Pictures first … first + count − 1. */
	microbatch(
		{ first, count }: { readonly first: number; readonly count: number },
		wants: { readonly wantsText: boolean; readonly wantsImages: boolean },
	): ImageTextMicrobatch {
		const pictures = Array.from({ length: count }, (_, index) => this.picture(first + index));
		return {
			text: wants.wantsText ? this.#text(pictures) : noText,
			images: wants.wantsImages
				? joinImages([noImages(0), ...pictures.map((one) => this.#image(one))])
				: noImages(count),
		};
	}

	/** The same pictures without their captions. */
	prompts(
		{ first, count }: { readonly first: number; readonly count: number },
		wants: { readonly wantsText: boolean; readonly wantsImages: boolean },
	): ImageTextMicrobatch {
		const { images } = this.microbatch({ first, count }, { ...wants, wantsText: false });
		if (!wants.wantsText) return { text: noText, images };
		const prompts = Array.from({ length: count }, (_, index) => this.#prompt(this.picture(first + index)));
		const ids = Int32Array.from(prompts.flatMap((prompt) => [...prompt]));
		return {
			text: {
				ids,
				labels: new Int32Array(ids.length).fill(ignored),
				lossMask: new Float32Array(ids.length),
				lengths: prompts.map(({ length }) => length),
			},
			images,
		};
	}

	/** Ids of a picture's place in a sequence: its image tokens. */
	#prompt(picture: DigitPicture): Int32Array {
		return new Int32Array(this.#tokens(picture)).fill(this.c.imageTokenId);
	}

	#tokens({ height, width }: { readonly height: number; readonly width: number }): number {
		const { patchDim, pixelShuffle, disableVisionClassToken, classTokenLen } = this.c;
		const config = { pixelShuffle, dropClassTokens: disableVisionClassToken, classTokens: classTokenLen };
		return outputRows(config, { rows: height / patchDim, columns: width / patchDim });
	}

	/** Sequences of their own lengths, made even for the tensor-parallel ranks by padding that counts in no loss. */
	#text(pictures: readonly DigitPicture[]): Microbatch {
		const { llmTp } = this.c;
		const sequences = pictures.map((picture) => {
			const prompt = this.#prompt(picture);
			const caption = Int32Array.from([...new TextEncoder().encode(picture.caption), endOfCaption]);
			// The last image token predicts the caption's first byte, its last byte the end.
			const length = prompt.length + caption.length - 1;
			const padded = Math.ceil(length / llmTp) * llmTp;
			const ids = new Int32Array(padded);
			ids.set(prompt);
			ids.set(caption.subarray(0, -1), prompt.length);
			const labels = new Int32Array(padded).fill(ignored);
			labels.set(caption, prompt.length - 1);
			return { ids, labels };
		});
		const join = (parts: readonly Int32Array[]) => {
			const all = new Int32Array(parts.reduce((sum, part) => sum + part.length, 0));
			let at = 0;
			for (const part of parts) {
				all.set(part, at);
				at += part.length;
			}
			return all;
		};
		const labels = join(sequences.map((sequence) => sequence.labels));
		return {
			ids: join(sequences.map((sequence) => sequence.ids)),
			labels,
			lossMask: Float32Array.from(labels, (label) => (label === ignored ? 0 : 1)),
			lengths: sequences.map(({ ids }) => ids.length),
		};
	}

	#image({ height, width, pixels }: DigitPicture): ImageSet {
		const { patchDim } = this.c;
		const values = new Float32Array(3 * pixels.length);
		for (let channel = 0; channel < 3; channel++) {
			const plane = values.subarray(channel * pixels.length, (channel + 1) * pixels.length);
			for (let i = 0; i < pixels.length; i++) {
				plane[i] = (Math.fround(pixels[i]! / 255) - mean[channel]!) / deviation[channel]!;
			}
		}
		return {
			patches: patchify(values, height, width, patchDim),
			grids: [{ rows: height / patchDim, columns: width / patchDim }],
			imagesPerSample: [1],
		};
	}
}
