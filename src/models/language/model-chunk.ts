/**
 * A model chunk of the hybrid Mamba-2 / attention / MLP / MoE language model (docs/spec/language-model.md §1–§5): all layers, or
 * those of a virtual pipeline stage. The tokens of a microbatch's sequences are packed: activations are x_TH. With tensor parallelism each
 * rank holds an equal run of the tokens between layers. With context parallelism T is the tokens of a rank's run within layers.
 */
import type { LayerKind } from "../../config/hybrid-pattern.ts";
import { gatherSequence, type ModelParallel, reduceScatterSequence } from "../../parallel/index.ts";
import {
	add,
	embedding,
	linear,
	type Parameter,
	ResidualSum,
	recompute,
	type Sequences,
	type SparseMatrix,
	spmm,
	type Tape,
	type Tensor,
	type TokenSlice,
} from "../../tensor/index.ts";
import type { HybridConfig } from "./config.ts";
import { hiddenDropout, runLayer } from "./layer.ts";
import type { LayerProbe } from "./layer-context.ts";
import { languageModelPrefix, mainLayer } from "./layer-numbering.ts";
import { type ModelMasks, masked } from "./masks.ts";
import { positionEmbedding, wordEmbedding } from "./names.ts";
import { exhaust, type Nodes } from "./nodes.ts";
import { norm } from "./norm.ts";
import { blocksOf, type PipelineSegment } from "./pipeline-segments.ts";
import type { PooledBalancing } from "./pooled-balancing.ts";
import type { RouterState } from "./router-state.ts";
import type { Mixing } from "./sequence-mixing.ts";

/**
 * Called with each activation: "text_embedding", "embedding" (with image rows), "layer.0" … (with residual), "final_norm",
 * "logits".
 */
export type Observer = (name: string, value: Tensor) => void;

export interface ForwardInput {
	/** Token ids of this rank's run of the tokens within layers, i32 [T / cp]; an id outside the vocabulary embeds as zeros. */
	readonly ids: Tensor;
	readonly sequences: Sequences;
	/** The parts of the sequences in this rank's run of tokens between layers. */
	readonly localSequences: Sequences;
	/** Index of each token of this rank's run in its sequence, i32 [T / tp]; -1: an id below zero. Not the caller's to dispose. */
	readonly localPositions: () => Tensor;
	/** Philox key of the step's dropout masks. */
	readonly dropoutKey: number;
	/** Indices of this rank's run of the tokens within layers in the step's global batch. */
	readonly tokens: TokenSlice;
	/** The tokens in this rank's run between layers. */
	readonly localTokens: TokenSlice;
	/** Positions of the tokens on every axis of multimodal rotary embedding; absent: the places in the sequences, on each. */
	readonly axes?: TokenAxes | undefined;
	/** Adds rows to the hidden states behind layers, by layer index: DeepStack. */
	readonly behind?: ReadonlyMap<number, (tape: Tape, hidden: Tensor) => Tensor>;
	/** Adds the image rows to the embedding of this rank's tokens, [T / tp, H]. */
	readonly addToEmbedding?: (embedded: Tensor) => Tensor;
	/** Masks of an elastic model's sampled submodel; default: none. */
	readonly masks?: ModelMasks | undefined;
	/** The sequence-mixing operations of each layer; default: on whole sequences, without a cache. */
	readonly mixing?: (layer: number) => Mixing;
	/** Weight of the microbatch's router losses, each a mean over its tokens, in the sum that is differentiated; default: their number. */
	readonly routerWeight?: number;
	/** As in LayerContext. */
	readonly pooled?: PooledBalancing | null;
	/** Selects the tokens whose logits are computed; default: all. */
	readonly wanted?: SparseMatrix;
}

/** Every token of a microbatch as a sequence of its own, and its position on each axis, i32 [T]. */
export interface TokenAxes {
	readonly tokens: Sequences;
	readonly positions: readonly Tensor[];
}

/** The parts of the model that a chunk uses. */
export interface ModelChunkParts {
	readonly config: HybridConfig;
	readonly parallel: ModelParallel;
	readonly parameter: (name: string) => Parameter;
	/** Router state of the MoE layers by layer index. */
	readonly routers: ReadonlyMap<number, RouterState>;
	/** As in LayerContext. */
	readonly ropeFrequencies: ReadonlyMap<LayerKind, Tensor>;
	/** Frequencies of every axis of positions, f64; empty: there is one axis. */
	readonly axisFrequencies: readonly Tensor[];
	/** First row of this rank's vocabulary shard. */
	readonly vocabularyStart: number;
	/** Returns the probe of the pass to come, or null; absent: layers are never observed. */
	readonly probe?: () => LayerProbe | null;
}

/** The word embedding of this rank's tokens of `ids`, i32 [T]. */
export function embedTokens(tape: Tape, parts: ModelChunkParts, ids: Tensor): Tensor {
	const { config, parallel, parameter, vocabularyStart } = parts;
	using partial = embedding(tape, ids, parameter(wordEmbedding), { vocabularyStart, ...config.embedding });
	return reduceScatterSequence(tape, partial, parallel.tp);
}

export class ModelChunk {
	constructor(
		readonly segment: PipelineSegment,
		readonly parts: ModelChunkParts,
	) {}

	/**
	 * Forward pass from the ids, or from the chunk before's hidden states_(T/tp)H (`entered`), to hidden states_(T/tp)H for the
	 * next chunk or, with the output layer, logits_T(V/tp) of all tokens and this rank's vocabulary shard.
	 */
	forward(tape: Tape, input: ForwardInput, entered: Tensor | null, observe?: Observer): Tensor {
		const hidden = exhaust(this.hidden(tape, input, entered, observe));
		if (!this.segment.hasHead) return hidden;
		using normed = hidden;
		return this.logits(tape, normed, observe, input.wanted);
	}

	/**
	 * Hidden states_(T/tp)H for the next chunk, normed if the output layer follows. Yields before and after each block, and while
	 * a block's rows are in flight.
	 */
	*hidden(tape: Tape, input: ForwardInput, entered: Tensor | null, observe?: Observer): Nodes<Tensor> {
		const beyond = [...(input.behind?.keys() ?? [])].find((layer) => layer >= this.segment.end);
		if (beyond !== undefined)
			throw new Error(`Rows for layer ${beyond} came to a chunk of ${this.segment.end} layers.`);
		using first = entered?.share() ?? this.#embed(tape, input, observe);
		if (this.segment.embeds) observe?.("embedding", first);
		using last = yield* this.#layers(tape, first, input, observe);
		if (!this.segment.hasHead) last.written();
		yield;
		if (!this.segment.hasHead) return last.tensor.share();
		tape.begin("output");
		const weights = (name: string) => this.#parameter(name);
		const { config } = this.parts;
		const normed = norm(tape, { config, weights }, last.tensor, "decoder.final_norm.weight", {
			mask: input.masks?.norm ?? null,
			sum: last,
		});
		observe?.("final_norm", normed);
		return normed;
	}

	/** The output layer of normed hidden states_(T/tp)H: logits_T(V/tp) of all tokens and this rank's vocabulary shard. */
	logits(tape: Tape, normed: Tensor, observe?: Observer, wanted?: SparseMatrix): Tensor {
		using gathered = gatherSequence(tape, normed, this.parts.parallel.tp);
		using everyToken = wanted ? spmm(tape, wanted, gathered) : gathered.share();
		const output = this.parts.config.tieWordEmbeddings ? "embedding.word_embeddings.weight" : "output_layer.weight";
		const logits = linear(tape, everyToken, this.#parameter(output), null, { weightGradientLate: false });
		observe?.("logits", logits);
		return logits;
	}

	#parameter(name: string) {
		return this.parts.parameter(languageModelPrefix + name);
	}

	#embed(tape: Tape, input: ForwardInput, observe: Observer | undefined): Tensor {
		using embedded = embedTokens(tape, this.parts, input.ids);
		using placed = this.#addPositions(tape, embedded, input);
		using dropped = hiddenDropout(tape, this.parts, placed, input, "embedding");
		observe?.("text_embedding", dropped);
		using whole = input.addToEmbedding?.(dropped) ?? dropped.share();
		return masked(tape, whole, input.masks?.masksEmbedding ? input.masks.hidden : null);
	}

	/** Adds the learned positions of this rank's tokens, if the model has any; rows of other modules have none. */
	#addPositions(tape: Tape, embedded: Tensor, { localPositions }: ForwardInput): Tensor {
		if (this.parts.config.learnedPositions === null) return embedded.share();
		using positions = embedding(tape, localPositions(), this.parts.parameter(positionEmbedding));
		return add(tape, embedded, positions);
	}

	*#layers(tape: Tape, first: Tensor, input: ForwardInput, observe: Observer | undefined): Nodes<ResidualSum> {
		let x = ResidualSum.of(first);
		const starts = new Set(this.#blocks.map(({ begin }) => begin));
		for (const { begin, end, recomputed } of this.#runs) {
			using previous = x;
			if (starts.has(begin)) yield;
			tape.begin(`layer.${begin}`);
			x = recomputed
				? this.#recompute(tape, begin, end, previous.written(), input)
				: yield* runLayer(tape, this.parts, mainLayer(this.parts.config, begin), previous, input);
			observe?.(`layer.${end - 1}`, x.written());
		}
		return x;
	}

	/** The layers as runs to recompute together, and single layers to run plainly. */
	get #runs(): { readonly begin: number; readonly end: number; readonly recomputed: boolean }[] {
		const { recompute } = this.parts.config;
		const wanted = recompute?.granularity === "full" ? recompute : null;
		const blocks = this.#blocks;
		const limit = wanted === null ? 0 : wanted.method === "uniform" ? blocks.length : wanted.layers;
		const length = wanted?.method === "uniform" ? wanted.layers : 1;
		const recomputed = blocks.slice(0, limit);
		const runs = recomputed.flatMap(({ begin }, block) => {
			if (block % length !== 0) return [];
			const last = recomputed[Math.min(block + length, recomputed.length) - 1]!;
			return [{ begin, end: last.end, recomputed: true }];
		});
		const others = blocks
			.slice(limit)
			.flatMap(({ begin, end }) =>
				Array.from({ length: end - begin }, (_, at) => ({ begin: begin + at, end: begin + at + 1, recomputed: false })),
			);
		return [...runs, ...others];
	}

	get #blocks() {
		return blocksOf(this.parts.config.blocks, this.segment);
	}

	/** Runs layers [begin, end) and keeps only the first layer's input; backward recomputes the rest. */
	#recompute(tape: Tape, begin: number, end: number, first: Tensor, input: ForwardInput): ResidualSum {
		using y = recompute(tape, first, (again, value) => {
			let x = ResidualSum.of(value);
			for (let index = begin; index < end; index++) {
				using previous = x;
				x = exhaust(runLayer(again, this.parts, mainLayer(this.parts.config, index), previous, input));
			}
			using last = x;
			return last.written().share();
		});
		return ResidualSum.of(y);
	}
}
