/**
 * The hybrid Mamba-2 / attention / MLP / MoE language model (spec language-model 1-5). Tokens of all sequences of a
 * microbatch lie one after the other: activations are x_TH. With tensor parallelism each rank holds an equal run of the
 * tokens between layers.
 */
import type { Device } from "../../native/device.ts";
import { type ModelParallel, noModelParallel, placeOf } from "../../parallel/model-parallel.ts";
import type { BucketSize, ParameterSet } from "../../parallel/parameter-set.ts";
import { gatherSequence, reduceScatterSequence } from "../../parallel/tensor-parallel.ts";
import { add } from "../../tensor/ops/add.ts";
import { dropout } from "../../tensor/ops/dropout.ts";
import { embedding } from "../../tensor/ops/embedding.ts";
import { linear } from "../../tensor/ops/linear.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import { recompute } from "../../tensor/recompute.ts";
import type { Sequences } from "../../tensor/sequences.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import { philoxKey } from "../initialise.ts";
import { type LogicalTensor, ModuleParameters } from "../module-parameters.ts";
import { attentionLayer } from "./attention.ts";
import type { HybridConfig } from "./config.ts";
import type { LayerContext } from "./layer.ts";
import { mambaLayer } from "./mamba.ts";
import { mlpLayer } from "./mlp.ts";
import { moeLayer } from "./moe.ts";
import { hybridParameters, languageModelPrefix, layerPrefix } from "./names.ts";
import { RouterState } from "./router-state.ts";

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
	/** Index of token 0 among the tokens of the step's global batch: dropout masks follow it, so no layout matters. */
	readonly firstToken: number;
	/** Adds to the embedding of this rank's tokens, [T / tp, H]: image rows in their places. */
	readonly addToEmbedding?: (embedded: Tensor) => Tensor;
}

export class HybridModel implements Disposable {
	readonly #parameters: ModuleParameters;
	/** Default: this process alone. */
	readonly parallel: ModelParallel;
	/** State of every MoE layer's router by layer index. */
	readonly routers: ReadonlyMap<number, RouterState>;

	constructor(
		readonly device: Device,
		readonly config: HybridConfig,
		options: {
			readonly frozen: boolean;
			readonly parallel?: ModelParallel;
			/** Replicas of dense and of expert parameters; default one. */
			readonly replicas?: { readonly dense: number; readonly expert: number };
			/** How gradients are cut for reduction; default: not. */
			readonly buckets?: BucketSize;
		},
	) {
		this.parallel = options.parallel ?? noModelParallel("language", 0);
		this.#parameters = new ModuleParameters(device, hybridParameters(config), placeOf(this.parallel), {
			dtype: config.dtype,
			frozen: () => options.frozen,
			...(options.replicas ? { replicas: options.replicas } : {}),
			...(options.buckets ? { buckets: options.buckets } : {}),
		});
		this.routers = new Map(
			config.pattern.flatMap((symbol, layer) =>
				symbol === "E" ? [[layer, new RouterState(device, config.moe, this.parallel.tp.size)]] : [],
			),
		);
	}

	get parameters(): ParameterSet {
		return this.#parameters.set;
	}

	/** Draws initial values from `seed`. */
	initialise(seed: number): void {
		this.#parameters.initialise(seed);
	}

	/** This rank's part of every tensor of the model, buffers included. */
	*logicalTensors(): Generator<LogicalTensor> {
		yield* this.#parameters.logicalTensors();
		if (!this.config.moe.expertBias) return;
		for (const [layer, { expertBias }] of this.routers) {
			const experts = expertBias.elements;
			const block = { localRow: 0, fullRow: 0, rows: experts, localColumn: 0, fullColumn: 0, columns: 1 };
			yield {
				name: `${layerPrefix(layer)}mlp.router.expert_bias`,
				shape: [experts],
				value: expertBias.view([experts, 1]),
				gradient: null,
				blocks: [block],
			};
		}
	}

	/** Logits_T(V/tp) of a microbatch: all its tokens, this rank's part of the vocabulary. */
	forward(tape: Tape, input: ForwardInput, observe: Observer = () => {}): Tensor {
		const { tp } = this.parallel;
		using embedded = this.#embed(tape, input, observe);
		observe("embedding", embedded);
		using hidden = this.#layers(tape, embedded, input, observe);
		using normed = rmsNorm(tape, hidden, this.#parameter("decoder.final_norm.weight"), this.config.normEpsilon);
		observe("final_norm", normed);
		using everyToken = gatherSequence(tape, normed, tp);
		const output = this.config.tieWordEmbeddings ? "embedding.word_embeddings.weight" : "output_layer.weight";
		const logits = linear(tape, everyToken, this.#parameter(output));
		observe("logits", logits);
		return logits;
	}

	/** First row of this rank's part of the vocabulary, and how many of its rows are no padding. */
	get vocabularyShard(): { readonly start: number; readonly live: number } {
		const { tp } = this.parallel;
		const rows = this.config.paddedVocabularySize / tp.size;
		const start = tp.rank * rows;
		return { start, live: Math.max(0, Math.min(rows, this.config.vocabularySize - start)) };
	}

	[Symbol.dispose](): void {
		this.#parameters[Symbol.dispose]();
		for (const router of this.routers.values()) router[Symbol.dispose]();
	}

	#parameter(name: string) {
		return this.parameters.get(languageModelPrefix + name);
	}

	#embed(tape: Tape, input: ForwardInput, observe: Observer): Tensor {
		const table = this.#parameter("embedding.word_embeddings.weight");
		using partial = embedding(tape, input.ids, table, this.vocabularyShard.start);
		using embedded = reduceScatterSequence(tape, partial, this.parallel.tp);
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
		tape.begin("output");
		return x;
	}

	/** Layers in order: runs of recomputed ones, the others one by one. */
	get #runs(): { readonly begin: number; readonly end: number; readonly recomputed: boolean }[] {
		const { pattern, recomputedRuns } = this.config;
		const recomputed = recomputedRuns.map((run) => ({ ...run, recomputed: true }));
		const plain = [...pattern.keys()]
			.filter((layer) => !recomputedRuns.some(({ begin, end }) => begin <= layer && layer < end))
			.map((layer) => ({ begin: layer, end: layer + 1, recomputed: false }));
		return [...recomputed, ...plain].sort((a, b) => a.begin - b.begin);
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
			config: this.config,
			parallel: this.parallel,
			weights: (name) => this.parameters.get(layerPrefix(index) + name),
			sequences: input.sequences,
			localSequences: input.localSequences,
		};
		using branch = this.#branch(tape, index, context, x, input);
		using dropped = this.#dropout(tape, branch, input, `layer.${index}`);
		return add(tape, x, dropped);
	}

	#branch(tape: Tape, index: number, context: LayerContext, x: Tensor, input: ForwardInput): Tensor {
		switch (this.config.pattern[index]!) {
			case "M":
				return mambaLayer(tape, context, x);
			case "*":
				return attentionLayer(tape, context, x, {
					seed: philoxKey(input.dropoutKey, `layer.${index}.attention_dropout`),
					firstToken: input.firstToken,
				});
			case "-":
				return mlpLayer(tape, context, x);
			case "E":
				return moeLayer(tape, context, this.routers.get(index)!, x);
		}
	}

	#dropout(tape: Tape, x: Tensor, input: ForwardInput, place: string): Tensor {
		const probability = tape.training ? this.config.hiddenDropout : 0;
		if (probability === 0) return x.share();
		const { tp } = this.parallel;
		const seed = philoxKey(input.dropoutKey, `${place}.hidden_dropout`);
		return dropout(tape, x, { probability, seed, firstRow: input.firstToken + tp.rank * input.localSequences.tokens });
	}
}
