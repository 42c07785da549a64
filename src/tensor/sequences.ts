/**
 * Boundaries of the sequences of a packed microbatch. Tokens of all sequences are concatenated; attention and the state space
 * scan never cross a boundary. Sequences may be empty.
 */
import type { Device } from "../native/device.ts";
import { Tensor } from "./tensor.ts";

export class Sequences implements Disposable {
	private constructor(
		/** Cumulative token counts on the device, int32 [count + 1]: first 0, last `tokens`. */
		readonly cuSeqlens: Tensor,
		/** Tokens of every sequence, on the host. */
		readonly lengths: readonly number[],
		/** Tokens of all sequences. */
		readonly tokens: number,
		/** Tokens of the longest sequence. */
		readonly maxSeqlen: number,
	) {}

	/** Sequences of these lengths, packed in this order. */
	static of(device: Device, lengths: readonly number[]): Sequences {
		const ends = new Int32Array(lengths.length + 1);
		let tokens = 0;
		for (const [index, length] of lengths.entries()) {
			tokens += length;
			if (!Number.isInteger(length) || length < 0 || tokens > 0x7fffffff) {
				throw new RangeError(`Sequence ${index} cannot have ${length} tokens.`);
			}
			ends[index + 1] = tokens;
		}
		const longest = lengths.reduce((most, length) => Math.max(most, length), 0);
		return new Sequences(Tensor.from(device, ends), [...lengths], tokens, longest);
	}

	/** A batch of `batch` sequences of `length` tokens each. */
	static batch(device: Device, batch: number, length: number): Sequences {
		return Sequences.of(device, new Array<number>(batch).fill(length));
	}

	/** Number of sequences. */
	get count(): number {
		return this.lengths.length;
	}

	[Symbol.dispose](): void {
		this.cuSeqlens[Symbol.dispose]();
	}
}
