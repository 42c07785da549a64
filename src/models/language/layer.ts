/** Runs a layer of any kind with its residual and hidden dropout (docs/spec/language-model.md §1.5). */
import { dropout, ResidualSum, type Tape, Tensor } from "../../tensor/index.ts";
import { philoxKey } from "../initialise.ts";
import { configOfLayer } from "./config.ts";
import { kinds } from "./kinds/index.ts";
import type { LayerContext } from "./layer-context.ts";
import type { LayerPlace } from "./layer-numbering.ts";
import { addBranch } from "./masks.ts";
import type { ForwardInput, ModelChunkParts } from "./model-chunk.ts";
import type { Nodes } from "./nodes.ts";
import { norm } from "./norm.ts";
import { wholeSequences } from "./sequence-mixing.ts";

/** x + dropout(norm(branch(x))), the norm where the model has norms behind layers, x_(T/tp)H, a sum that the next norm may write. `name` keys the layer's dropout masks. */
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
		ropeFrequencies: parts.ropeFrequencies.get(place.kind) ?? null,
		axes: input.axes ? { ...input.axes, frequencies: parts.axisFrequencies } : null,
		router: parts.routers.get(place.index) ?? null,
		routerWeight: input.routerWeight ?? input.sequences.tokens,
		pooled: input.pooled ?? null,
		probe: (value) => {
			const observe = probe?.[value];
			return observe ? (tensor, rows) => observe(tensor, pass, rows) : null;
		},
		random: { key: input.dropoutKey, place: name, tokens: input.tokens, localTokens: input.localTokens },
	};
	const result = kinds[place.kind].forward(tape, context, x);
	using branch = result instanceof Tensor ? result : yield* result;
	context.probe("branch")?.(branch);
	const { postNorm } = kinds[place.kind];
	using normed = context.config.postNorms && postNorm ? norm(tape, context, branch, postNorm) : branch.share();
	using dropped = hiddenDropout(tape, parts, normed, input, name);
	const sum = addBranch(tape, x.written(), dropped, context.masks?.hidden, context.layerMasks?.keep);
	const more = input.behind?.get(place.index);
	if (more === undefined) return sum;
	using without = sum;
	using whole = more(tape, without.written());
	return ResidualSum.of(whole);
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
