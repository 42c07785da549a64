/** Runs a layer of any kind with its residual and hidden dropout (docs/spec/language-model.md §1.5). */
import { dropout } from "../../tensor/ops/dropout.ts";
import type { ResidualSum } from "../../tensor/residual-sum.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import { philoxKey } from "../initialise.ts";
import { attentionLayer } from "./attention.ts";
import { configOfLayer } from "./config.ts";
import type { LayerContext } from "./layer-context.ts";
import type { LayerPlace } from "./layer-numbering.ts";
import { mambaLayer } from "./mamba.ts";
import { addBranch } from "./masks.ts";
import { mlpLayer } from "./mlp.ts";
import type { ForwardInput, ModelChunkParts } from "./model-chunk.ts";
import { moeLayer } from "./moe.ts";
import type { Nodes } from "./nodes.ts";
import { wholeSequences } from "./sequence-mixing.ts";

/** x + dropout(branch(x)), x_(T/tp)H, a sum that the next norm may write. `name` keys the layer's dropout masks. */
export function* runLayer(
	tape: Tape,
	parts: ModelChunkParts,
	place: LayerPlace,
	x: ResidualSum,
	input: ForwardInput,
	name = `layer.${place.index}`,
): Nodes<ResidualSum> {
	const probe = parts.probe?.() ?? null;
	const pass = { layer: place.index, name, localTokens: input.localTokens };
	const context: LayerContext = {
		config: configOfLayer(parts.config, place.index),
		parallel: parts.parallel,
		weights: (end) => parts.parameter(place.prefix + end),
		masks: input.masks ?? null,
		layerMasks: input.masks?.layer(place.index) ?? null,
		mixing: input.mixing?.(place.index) ?? wholeSequences,
		sequences: input.sequences,
		localSequences: input.localSequences,
		routerWeight: input.routerWeight ?? input.sequences.tokens,
		probe: (value) => {
			const observe = probe?.[value];
			return observe ? (tensor, rows) => observe(tensor, pass, rows) : null;
		},
		random: { key: input.dropoutKey, place: name, tokens: input.tokens, localTokens: input.localTokens },
	};
	using branch = yield* runBranch(tape, parts, place, context, x, input, name);
	context.probe("branch")?.(branch);
	using dropped = hiddenDropout(tape, parts, branch, input, name);
	return addBranch(tape, x.written(), dropped, context.masks?.hidden, context.layerMasks?.keep);
}

function* runBranch(
	tape: Tape,
	parts: ModelChunkParts,
	place: LayerPlace,
	context: LayerContext,
	x: ResidualSum,
	input: ForwardInput,
	name: string,
): Nodes<Tensor> {
	switch (place.symbol) {
		case "M":
			return mambaLayer(tape, context, x);
		case "*":
			return attentionLayer(tape, context, x, {
				seed: philoxKey(input.dropoutKey, `${name}.attention_dropout`),
				tokens: input.tokens,
			});
		case "-":
			return mlpLayer(tape, context, x);
		case "E":
			return yield* moeLayer(tape, context, parts.routers.get(place.index)!, x);
	}
}

/** Hidden dropout of this rank's tokens; `place` keys the mask. */
export function hiddenDropout(
	tape: Tape,
	parts: ModelChunkParts,
	x: Tensor,
	input: ForwardInput,
	place: string,
): Tensor {
	const probability = tape.training ? parts.config.hiddenDropout : 0;
	if (probability === 0) return x.share();
	const seed = philoxKey(input.dropoutKey, `${place}.hidden_dropout`);
	return dropout(tape, x, { probability, seed, rows: input.localTokens });
}
