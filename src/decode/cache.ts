/**
 * The decoding cache of a batch of sequences: keys and values of the attention layers, latents of multi-latent attention, last inputs
 * of the convolutions and states of the Mamba-2 and Gated DeltaNet layers (docs/spec/language-model.md §2.2, §3). A forward pass over whole prompts (prefill) fills it; a decoding
 * step reads it and adds a token to some of the sequences.
 */
import { type Mixing, wholeSequences } from "../models/language/sequence-mixing.ts";
import type { Device } from "../native/device.ts";
import {
	type AttentionOptions,
	attention,
	attentionStep,
	type CachePlaces,
	causalConv1d,
	causalConv1dStep,
	copyInto,
	gatedDelta,
	gatedDeltaStep,
	type KeyValueCache,
	latentAttentionStep,
	pickRows,
	rope,
	ropeLast,
	SparseMatrix,
	ssdScan,
	ssdStep,
	stateElements,
	Tensor,
} from "../tensor/index.ts";

/** The sequences to which a step adds a token, and the places of their earlier tokens. */
export interface StepPlaces extends CachePlaces {
	/** Number of every sequence in the cache, i32 [S]. */
	readonly slots: Tensor;
	/** Position of every new token for rotary embeddings, i32 [S]. */
	readonly positions: Tensor;
}

export class DecodingCache implements Disposable {
	/** Row of every sequence's first key, and the rows of all. */
	readonly firstRows: readonly number[];
	readonly #rows: number;
	/** Keys and values by layer. */
	readonly #attention = new Map<number, KeyValueCache>();
	/** Latents and turned key columns of multi-latent attention, [rows, c+r], by layer. */
	readonly #latents = new Map<number, Tensor>();
	/** [sequences · (width − 1), C] by layer. */
	readonly #windows = new Map<number, Tensor>();
	/** [sequences · H · P, N] by layer; of Gated DeltaNet [sequences, H_v · D_k · D_v]. */
	readonly #states = new Map<number, Tensor>();

	/** `capacities`: most tokens of every sequence whose keys are kept. */
	constructor(
		readonly device: Device,
		capacities: readonly number[],
	) {
		let rows = 0;
		this.firstRows = capacities.map((capacity) => {
			rows += capacity;
			return rows - capacity;
		});
		this.#rows = rows;
	}

	/** A forward pass over whole prompts of `lengths` tokens, one for every sequence of the cache, that fills it. */
	fill(lengths: readonly number[]): Filling {
		return new Filling(this.device, this, lengths, this.#rows);
	}

	/** The operations of `layer` over the next token of some sequences. */
	step(layer: number, places: StepPlaces): Mixing {
		return {
			rope: (tape, qkv, options) => rope(tape, qkv, { ...options, firstPositions: places.positions }),
			ropeLast: (tape, x, options) => ropeLast(tape, x, { ...options, firstPositions: places.positions }),
			latentStep: (token, options) => latentAttentionStep(token, options, this.#latents.get(layer)!, places),
			attention: (_, qkv, { queryHeads, keyHeads, headDim, softmaxScale, window, sinks }: AttentionOptions) =>
				attentionStep(qkv, this.#attention.get(layer)!, places, {
					queryHeads,
					keyHeads,
					headDim,
					softmaxScale: softmaxScale ?? 1 / Math.sqrt(headDim),
					window: window ?? null,
					sinks: sinks ?? null,
				}),
			convolution: (_, x, weight, bias) => causalConv1dStep(x, weight, bias, this.#windows.get(layer)!, places.slots),
			scan: (_, inputs) => ssdStep(inputs, this.#states.get(layer)!, places.slots),
			delta: (_, inputs) => gatedDeltaStep(inputs, this.#states.get(layer)!, places.slots),
		};
	}

	/** Takes ownership of the keys and values that the prefill of a layer leaves. */
	keepAttention(layer: number, kept: KeyValueCache): void {
		this.#attention.set(layer, kept);
	}
	keepLatents(layer: number, latents: Tensor): void {
		this.#latents.set(layer, latents);
	}
	keepWindow(layer: number, window: Tensor): void {
		this.#windows.set(layer, window);
	}
	keepState(layer: number, state: Tensor): void {
		this.#states.set(layer, state);
	}

	[Symbol.dispose](): void {
		for (const { keys, values } of this.#attention.values())
			for (const owned of [keys, values]) owned[Symbol.dispose]();
		for (const kept of [this.#latents, this.#windows, this.#states])
			for (const owned of kept.values()) owned[Symbol.dispose]();
	}
}

/** The prefill of prompts. Disposing it leaves the cache as it is. */
class Filling implements Disposable {
	/** Token of every row of keys, and of windows by their width. */
	#rowsOfKeys: SparseMatrix | null = null;
	readonly #windowRows = new Map<number, SparseMatrix>();
	readonly #tokens: number;

	constructor(
		private readonly device: Device,
		private readonly cache: DecodingCache,
		private readonly lengths: readonly number[],
		private readonly rows: number,
	) {
		this.#tokens = lengths.reduce((sum, length) => sum + length, 0);
	}

	/** The operations of `layer` over the prompts. */
	of(layer: number): Mixing {
		return {
			...wholeSequences,
			attention: (tape, qkv, options) => {
				this.#keepKeys(layer, qkv, options);
				return attention(tape, qkv, options);
			},
			keepLatent: (latent, position) => this.#keepLatents(layer, latent, position),
			convolution: (tape, x, weight, bias, sequences) => {
				this.#keepWindow(layer, x, weight.value.width);
				return causalConv1d(tape, x, weight, bias, sequences);
			},
			scan: (tape, inputs) => {
				const { heads, headDim, stateDim, sequences } = inputs;
				const finalState = Tensor.empty(this.device, [sequences.count * heads * headDim, stateDim]);
				this.cache.keepState(layer, finalState);
				return ssdScan(tape, { ...inputs, finalState });
			},
			delta: (tape, inputs) => {
				const finalState = Tensor.empty(this.device, [inputs.sequences.count, stateElements(inputs)]);
				this.cache.keepState(layer, finalState);
				return gatedDelta(tape, { ...inputs, finalState });
			},
		};
	}

	#keepKeys(layer: number, qkv: Tensor, { queryHeads, keyHeads, headDim }: AttentionOptions): void {
		const { rows } = this;
		const make = () => Tensor.empty(this.device, [keyHeads * rows, headDim], qkv.dtype);
		const kept = { keys: make(), values: make(), rows };
		this.cache.keepAttention(layer, kept);
		const queriesPerKey = queryHeads / keyHeads;
		for (let head = 0; head < keyHeads; head++) {
			const key = (head * (queriesPerKey + 2) + queriesPerKey) * headDim;
			for (const [from, to] of [
				[key, kept.keys],
				[key + headDim, kept.values],
			] as const) {
				using source = qkv.columns(from, headDim);
				using target = to.rowsFrom(head * rows, rows);
				this.#everyToken.multiply(source, target, false);
			}
		}
	}

	#keepLatents(layer: number, latent: Tensor, position: Tensor): void {
		const width = latent.width + position.width;
		using joined = Tensor.empty(this.device, [latent.rows, width], latent.dtype);
		for (const [part, first] of [
			[latent, 0],
			[position, latent.width],
		] as const) {
			using columns = joined.columns(first, part.width);
			copyInto(part, columns);
		}
		const kept = Tensor.empty(this.device, [this.rows, width], latent.dtype);
		this.cache.keepLatents(layer, kept);
		this.#everyToken.multiply(joined, kept, false);
	}

	/** Puts every token at its row of the cache. */
	get #everyToken(): SparseMatrix {
		this.#rowsOfKeys ??= this.#picked(
			this.rows,
			this.lengths.map((length, s) => ({ row: this.cache.firstRows[s]!, first: 0, count: length })),
		);
		return this.#rowsOfKeys;
	}

	#keepWindow(layer: number, x: Tensor, width: number): void {
		const window = Tensor.empty(this.device, [this.lengths.length * (width - 1), x.width], x.dtype);
		this.cache.keepWindow(layer, window);
		let matrix = this.#windowRows.get(width);
		if (!matrix) {
			matrix = this.#picked(
				window.rows,
				this.lengths.map((length, s) => {
					const count = Math.min(length, width - 1);
					return { row: (s + 1) * (width - 1) - count, first: length - count, count };
				}),
			);
			this.#windowRows.set(width, matrix);
		}
		matrix.multiply(x, window, false);
	}

	/** The matrix that puts `count` tokens of every prompt, from its `first`, at `row`; zeros elsewhere. */
	#picked(rows: number, runs: readonly { readonly row: number; readonly first: number; readonly count: number }[]) {
		const picked = new Int32Array(rows).fill(-1);
		let begin = 0;
		for (const [s, { row, first, count }] of runs.entries()) {
			for (let i = 0; i < count; i++) picked[row + i] = begin + first + i;
			begin += this.lengths[s]!;
		}
		return new SparseMatrix(this.device, pickRows(picked, this.#tokens));
	}

	[Symbol.dispose](): void {
		this.#rowsOfKeys?.[Symbol.dispose]();
		for (const matrix of this.#windowRows.values()) matrix[Symbol.dispose]();
	}
}
