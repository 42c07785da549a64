/**
 * A run of layers of the hybrid Mamba-2 / attention / MLP / MoE language model (spec language-model 1-5): the whole of it,
 * or the part that a pipeline stage passes at once. Tokens of all sequences of a microbatch lie one after the other:
 * activations are x_TH. With tensor parallelism each rank holds an equal run of the tokens between layers.
 */
import type { ModelParallel } from "../../parallel/model-parallel.ts";
import { gatherSequence, reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { add } from "../../tensor/ops/add.ts";
import { dropout } from "../../tensor/ops/dropout.ts";
import { embedding } from "../../tensor/ops/embedding.ts";
import { linear } from "../../tensor/ops/linear.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import { recompute } from "../../tensor/recompute.ts";
import type { Sequences } from "../../tensor/sequences.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { TokenSlice } from "../../tensor/token-slice.ts";
import { philoxKey } from "../initialise.ts";
import { attentionLayer } from "./attention.ts";
import type { HybridConfig } from "./config.ts";
import type { LayerContext } from "./layer.ts";
import { mambaLayer } from "./mamba.ts";
import { mlpLayer } from "./mlp.ts";
import { moeLayer } from "./moe.ts";
import { languageModelPrefix, layerPrefix } from "./names.ts";
import type { RouterState } from "./router-state.ts";
import type { Segment } from "./segments.ts";

/**
 * Called with values as they arise: "text_embedding", "embedding" (image rows added), "layer.0" … (residual added),
 * "final_norm", "logits".
 */
export type Observer = (name: string, value: Tensor) => void;

export interface ForwardInput {
	/** Token ids of the whole microbatch, i32 [T]; an id outside the vocabulary embeds as zeros. */
	readonly ids: Tensor;
	readonly sequences: Sequences;
	/** The parts of the sequences among the tokens that this rank holds between layers. */
	readonly localSequences: Sequences;
	/** Key of this step's dropout masks. */
	readonly dropoutKey: number;
	/** The microbatch's tokens among those of the step's global batch. */
	readonly tokens: TokenSlice;
	/** The part of them that this rank holds between layers. */
	readonly localTokens: TokenSlice;
	/** Adds to the embedding of this rank's tokens, [T / tp, H]: image rows in their places. */
	readonly addToEmbedding?: (embedded: Tensor) => Tensor;
}

/** What a stage has of its model. */
export interface StageParts {
	readonly config: HybridConfig;
	readonly parallel: ModelParallel;
	readonly parameter: (name: string) => Parameter;
	/** State of the MoE layers' routers by layer index. */
	readonly routers: ReadonlyMap<number, RouterState>;
	/** First row of this rank's part of the vocabulary. */
	readonly vocabularyStart: number;
}

export class HybridStage {
	constructor(
		readonly segment: Segment,
		private readonly parts: StageParts,
	) {}

	/**
	 * From the ids, or from the stage before's hidden states_(T/tp)H: hidden states_(T/tp)H for the next stage, or with a head
	 * logits_T(V/tp): all tokens, this rank's part of the vocabulary.
	 */
	forward(tape: Tape, input: ForwardInput, entered: Tensor | null, observe: Observer = () => {}): Tensor {
		const { tp } = this.parts.parallel;
		using first = entered?.share() ?? this.#embed(tape, input, observe);
		if (this.segment.embeds) observe("embedding", first);
		const hidden = this.#layers(tape, first, input, observe);
		if (!this.segment.hasHead) return hidden;
		using last = hidden;
		tape.begin("output");
		using normed = rmsNorm(tape, last, this.#parameter("decoder.final_norm.weight"), this.parts.config.normEpsilon);
		observe("final_norm", normed);
		using everyToken = gatherSequence(tape, normed, tp);
		const output = this.parts.config.tieWordEmbeddings ? "embedding.word_embeddings.weight" : "output_layer.weight";
		const logits = linear(tape, everyToken, this.#parameter(output), null, { weightGradientLate: false });
		observe("logits", logits);
		return logits;
	}

	#parameter(name: string) {
		return this.parts.parameter(languageModelPrefix + name);
	}

	#embed(tape: Tape, input: ForwardInput, observe: Observer): Tensor {
		const table = this.#parameter("embedding.word_embeddings.weight");
		using partial = embedding(tape, input.ids, table, this.parts.vocabularyStart);
		using embedded = reduceScatterSequence(tape, partial, this.parts.parallel.tp);
		using dropped = this.#dropout(tape, embedded, input, "embedding");
		observe("text_embedding", dropped);
		return input.addToEmbedding?.(dropped) ?? dropped.share();
	}

	#layers(tape: Tape, first: Tensor, input: ForwardInput, observe: Observer): Tensor {
		let x = first.share();
		for (const { begin, end, recomputed } of this.#runs) {
			using previous = x;
			tape.begin(`layer.${begin}`);
			x = recomputed
				? recompute(tape, previous, (again, value) => this.#run(again, begin, end, value, input))
				: this.#layer(tape, begin, previous, input);
			observe(`layer.${end - 1}`, x);
		}
		return x;
	}

	/** Layers in order: runs of recomputed ones, the others one by one. */
	get #runs(): { readonly begin: number; readonly end: number; readonly recomputed: boolean }[] {
		const { begin, end } = this.segment;
		const { recompute: wanted } = this.parts.config;
		const limit = wanted === null ? begin : wanted.method === "uniform" ? end : Math.min(end, begin + wanted.layers);
		const length = wanted?.method === "uniform" ? wanted.layers : 1;
		const runs: { begin: number; end: number; recomputed: boolean }[] = [];
		for (let layer = begin; layer < end; ) {
			const recomputed = layer < limit;
			const next = recomputed ? Math.min(layer + length, limit) : layer + 1;
			runs.push({ begin: layer, end: next, recomputed });
			layer = next;
		}
		return runs;
	}

	/** Layers [begin, end) one after the other. */
	#run(tape: Tape, begin: number, end: number, first: Tensor, input: ForwardInput): Tensor {
		let x = first.share();
		for (let index = begin; index < end; index++) {
			using previous = x;
			x = this.#layer(tape, index, previous, input);
		}
		return x;
	}

	/** One layer with its residual. */
	#layer(tape: Tape, index: number, x: Tensor, input: ForwardInput): Tensor {
		const context: LayerContext = {
			config: this.parts.config,
			parallel: this.parts.parallel,
			weights: (name) => this.parts.parameter(layerPrefix(index) + name),
			sequences: input.sequences,
			localSequences: input.localSequences,
		};
		using branch = this.#branch(tape, index, context, x, input);
		using dropped = this.#dropout(tape, branch, input, `layer.${index}`);
		return add(tape, x, dropped);
	}

	#branch(tape: Tape, index: number, context: LayerContext, x: Tensor, input: ForwardInput): Tensor {
		switch (this.parts.config.pattern[index]!) {
			case "M":
				return mambaLayer(tape, context, x);
			case "*":
				return attentionLayer(tape, context, x, {
					seed: philoxKey(input.dropoutKey, `layer.${index}.attention_dropout`),
					tokens: input.tokens,
				});
			case "-":
				return mlpLayer(tape, context, x);
			case "E":
				return moeLayer(tape, context, this.parts.routers.get(index)!, x);
		}
	}

	#dropout(tape: Tape, x: Tensor, input: ForwardInput, place: string): Tensor {
		const probability = tape.training ? this.parts.config.hiddenDropout : 0;
		if (probability === 0) return x.share();
		const seed = philoxKey(input.dropoutKey, `${place}.hidden_dropout`);
		return dropout(tape, x, { probability, seed, rows: input.localTokens });
	}
}
