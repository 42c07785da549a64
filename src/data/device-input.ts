/** A microbatch in device memory. */

import { ContextTokens, contextMixing } from "../models/language/context-mixing.ts";
import type { ForwardInput, TokenAxes } from "../models/language/model-chunk.ts";
import type { Device } from "../native/device.ts";
import type { ModelParallel } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { Sequences, Tensor, TokenSlice } from "../tensor/index.ts";
import type { Microbatch } from "./microbatch.ts";

export class DeviceInput implements Disposable {
	/** Ids, labels and mask of this rank's run of the tokens within layers, [T / cp]. */
	readonly ids: Tensor;
	readonly labels: Tensor;
	readonly mask: Tensor;
	readonly sequences: Sequences;
	/** The parts of the sequences among the tokens that this rank holds between layers. */
	readonly localSequences: Sequences;
	/** null: the rank holds all tokens within layers. */
	readonly #context: ContextTokens | null;
	readonly #axes: TokenAxes | undefined;
	#positions: Tensor | null = null;

	constructor(
		private readonly device: Device,
		private readonly microbatch: Microbatch,
		readonly parallel: Pick<ModelParallel, "cp" | "tokens">,
	) {
		const { lengths, positions } = microbatch;
		this.localSequences = Sequences.of(device, localLengths(lengths, parallel.tokens));
		this.ids = this.cut(microbatch.ids);
		this.labels = this.cut(microbatch.labels);
		this.mask = this.cut(microbatch.lossMask);
		this.sequences = Sequences.of(device, lengths);
		this.#context = parallel.cp.size > 1 ? new ContextTokens(device, lengths, parallel.cp) : null;
		this.#axes = positions && this.#axesOf(positions);
	}

	/** Values of this rank's run of the tokens within layers, of values_T of all. The caller disposes them. */
	cut(values: Int32Array | Float32Array): Tensor {
		const { first, count } = TokenSlice.of(0, values.length).cut(this.parallel.cp);
		return Tensor.from(this.device, values.subarray(first, first + count));
	}

	/** As ForwardInput.localPositions. Made when they are asked for. */
	#localPositions(): Tensor {
		if (this.#positions !== null) return this.#positions;
		const { ids, lengths } = this.microbatch;
		const all = Int32Array.from(lengths.flatMap((length) => Array.from({ length }, (_, position) => position)));
		for (const [token, id] of ids.entries()) if (id < 0) all[token] = -1;
		const { first, count } = TokenSlice.of(0, all.length).cut(this.parallel.tokens);
		this.#positions = Tensor.from(this.ids.device, all.subarray(first, first + count));
		return this.#positions;
	}

	/** The model's input. `tokens`: the microbatch's among those of the step's global batch. */
	forward(dropoutKey: number, tokens: TokenSlice): ForwardInput {
		const { ids, sequences, localSequences } = this;
		const { cp, tokens: ranks } = this.parallel;
		const localPositions = () => this.#localPositions();
		const shared = { ids, sequences, localSequences, localPositions, axes: this.#axes };
		const mixing = this.#context && contextMixing(this.#context, tokens.first);
		const places = { dropoutKey, tokens: tokens.cut(cp), localTokens: tokens.cut(ranks) };
		return { ...shared, ...places, ...(mixing && { mixing: () => mixing }) };
	}

	[Symbol.dispose](): void {
		for (const owned of [this.ids, this.labels, this.mask, this.sequences, this.localSequences]) {
			owned[Symbol.dispose]();
		}
		this.#positions?.[Symbol.dispose]();
		this.#context?.[Symbol.dispose]();
		for (const owned of this.#axes ? [this.#axes.tokens, ...this.#axes.positions] : []) owned[Symbol.dispose]();
	}

	#axesOf(positions: Int32Array): TokenAxes {
		const tokens = this.microbatch.ids.length;
		return {
			tokens: Sequences.batch(this.device, tokens / this.parallel.cp.size, 1),
			positions: Array.from({ length: positions.length / tokens }, (_, axis) =>
				this.cut(positions.subarray(axis * tokens, (axis + 1) * tokens)),
			),
		};
	}
}

/** Lengths of the parts of every sequence that lie in this rank's equal run of the tokens. */
function localLengths(lengths: readonly number[], ranks: ModelParallel["tokens"]): number[] {
	const tokens = lengths.reduce((sum, length) => sum + length, 0);
	if (tokens % ranks.size !== 0) {
		throw new UserError(
			`A microbatch of ${counted(tokens, "token")} cannot be cut over ${counted(ranks.size, "rank")}: micro-batch-size × seq-length must be a multiple of the ranks of tensor and context parallelism.`,
		);
	}
	const own = TokenSlice.of(0, tokens).cut(ranks);
	let start = 0;
	return lengths.map((length) => {
		start += length;
		return own.within(start - length, length);
	});
}
