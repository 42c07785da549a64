/** Model input of a step of decoding: a token of each of some sequences, and where the cache has those before. */
import type { HybridModel } from "../models/language/model.ts";
import type { ForwardInput } from "../models/language/model-chunk.ts";
import { Sequences, Tensor, TokenSlice } from "../tensor/index.ts";
import type { DecodingCache } from "./cache.ts";

/** The newest token of a sequence. */
export interface NewToken {
	/** Its number in the cache. */
	readonly sequence: number;
	readonly id: number;
	/** Tokens before it. */
	readonly length: number;
}

/** Buffers of steps of one number of tokens. */
interface Buffers extends Disposable {
	/** ids, slots, firstRows and lengths, i32 [4, tokens]. */
	readonly all: Tensor;
	readonly sequences: Sequences;
	readonly localSequences: Sequences;
	readonly parts: readonly [ids: Tensor, slots: Tensor, firstRows: Tensor, lengths: Tensor];
}

/** Bounds of lengths are multiples of this: steps ask for the same calls again and again, and CUDA graphs repeat. */
const lengthUnit = 256;

export class StepInput implements Disposable {
	readonly #buffers = new Map<number, Buffers>();

	/** `firstSpare`: the cache's sequences from there on, as many as tensor-parallel ranks, are padding. */
	constructor(
		readonly model: HybridModel,
		readonly cache: DecodingCache,
		private readonly firstSpare: number,
	) {}

	/**
	 * The input of a step over these tokens. Tensor-parallel ranks need equal parts of the rows, at least one each: spare
	 * sequences fill them up. It is valid until the next one is asked for.
	 */
	of(tokens: readonly NewToken[]): { readonly forward: ForwardInput; readonly rows: number } {
		const { tp } = this.model.parallel;
		const rows = Math.max(1, Math.ceil(tokens.length / tp.size)) * tp.size;
		const spares = Array.from({ length: rows - tokens.length }, (_, index) => ({
			sequence: this.firstSpare + index,
			id: 0,
			length: 0,
		}));
		const all = [...tokens, ...spares];
		const buffers = this.#of(rows);
		const { device } = this.model;
		device.copyToDevice(
			buffers.all,
			Int32Array.from([
				...all.map(({ id }) => id),
				...all.map(({ sequence }) => sequence),
				...all.map(({ sequence }) => this.cache.firstRows[sequence]!),
				...all.map(({ length }) => length),
			]),
		);
		const [ids, slots, firstRows, lengths] = buffers.parts;
		const longest = Math.max(...all.map(({ length }) => length));
		const places = { slots, firstRows, lengths, maxLength: Math.ceil((longest + 1) / lengthUnit) * lengthUnit - 1 };
		const slice = TokenSlice.of(0, rows);
		return {
			rows,
			forward: {
				ids,
				sequences: buffers.sequences,
				localSequences: buffers.localSequences,
				dropoutKey: 0,
				tokens: slice,
				localTokens: slice.cut(tp),
				mixing: (layer) => this.cache.step(layer, places),
			},
		};
	}

	#of(rows: number): Buffers {
		const found = this.#buffers.get(rows);
		if (found) return found;
		const { device, parallel } = this.model;
		const all = Tensor.empty(device, [4, rows], "i32", "data");
		const sequences = Sequences.batch(device, rows, 1);
		const localSequences = Sequences.batch(device, rows / parallel.tp.size, 1);
		const part = (row: number) => {
			using own = all.rowsFrom(row, 1);
			return own.view([rows]);
		};
		const parts = [part(0), part(1), part(2), part(3)] as const;
		const made: Buffers = {
			all,
			sequences,
			localSequences,
			parts,
			[Symbol.dispose]: () => {
				for (const owned of [all, sequences, localSequences, ...parts]) owned[Symbol.dispose]();
			},
		};
		this.#buffers.set(rows, made);
		return made;
	}

	[Symbol.dispose](): void {
		for (const buffers of this.#buffers.values()) buffers[Symbol.dispose]();
	}
}
