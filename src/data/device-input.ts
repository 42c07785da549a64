/** A microbatch in device memory. */

import type { ForwardInput, TokenAxes } from "../models/language/model-chunk.ts";
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { Sequences, Tensor, TokenSlice } from "../tensor/index.ts";
import type { Microbatch } from "./microbatch.ts";

export class DeviceInput implements Disposable {
	readonly ids: Tensor;
	readonly labels: Tensor;
	readonly mask: Tensor;
	readonly sequences: Sequences;
	/** The parts of the sequences among the tokens that this rank holds between layers. */
	readonly localSequences: Sequences;
	readonly #axes: TokenAxes | undefined;
	#positions: Tensor | null = null;

	constructor(
		device: Device,
		private readonly microbatch: Microbatch,
		readonly tp: Group,
	) {
		this.ids = Tensor.from(device, microbatch.ids);
		this.labels = Tensor.from(device, microbatch.labels);
		this.mask = Tensor.from(device, microbatch.lossMask);
		this.sequences = Sequences.of(device, microbatch.lengths);
		this.localSequences = Sequences.of(device, localLengths(microbatch.lengths, tp));
		this.#axes = microbatch.positions && axesOf(device, microbatch.positions, microbatch.ids.length);
	}

	/** As ForwardInput.localPositions. Made when they are asked for. */
	#localPositions(): Tensor {
		if (this.#positions !== null) return this.#positions;
		const { ids, lengths } = this.microbatch;
		const all = Int32Array.from(lengths.flatMap((length) => Array.from({ length }, (_, position) => position)));
		for (const [token, id] of ids.entries()) if (id < 0) all[token] = -1;
		const { first, count } = TokenSlice.of(0, all.length).cut(this.tp);
		this.#positions = Tensor.from(this.ids.device, all.subarray(first, first + count));
		return this.#positions;
	}

	/** The model's input. `tokens`: the microbatch's among those of the step's global batch. */
	forward(dropoutKey: number, tokens: TokenSlice): ForwardInput {
		const { ids, sequences, localSequences } = this;
		const localPositions = () => this.#localPositions();
		const shared = { ids, sequences, localSequences, localPositions, axes: this.#axes };
		return { ...shared, dropoutKey, tokens, localTokens: tokens.cut(this.tp) };
	}

	[Symbol.dispose](): void {
		for (const owned of [this.ids, this.labels, this.mask, this.sequences, this.localSequences]) {
			owned[Symbol.dispose]();
		}
		this.#positions?.[Symbol.dispose]();
		for (const owned of this.#axes ? [this.#axes.tokens, ...this.#axes.positions] : []) owned[Symbol.dispose]();
	}
}

function axesOf(device: Device, positions: Int32Array, tokens: number): TokenAxes {
	return {
		tokens: Sequences.batch(device, tokens, 1),
		positions: Array.from({ length: positions.length / tokens }, (_, axis) =>
			Tensor.from(device, positions.subarray(axis * tokens, (axis + 1) * tokens)),
		),
	};
}

/** Lengths of the parts of every sequence that lie in this rank's equal run of the tokens. */
function localLengths(lengths: readonly number[], tp: Group): number[] {
	const tokens = lengths.reduce((sum, length) => sum + length, 0);
	if (tokens % tp.size !== 0) {
		throw new UserError(
			`A microbatch of ${counted(tokens, "token")} cannot be cut over ${counted(tp.size, "tensor-parallel rank")}: micro-batch-size × seq-length must be a multiple of the tensor-parallel size.`,
		);
	}
	const own = TokenSlice.of(0, tokens).cut(tp);
	let start = 0;
	return lengths.map((length) => {
		start += length;
		return own.within(start - length, length);
	});
}
