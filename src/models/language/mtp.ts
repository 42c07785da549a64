/**
 * Multi-token prediction (docs/spec/language-model.md §5.4): depth k predicts each token's (k + 1)-th next from the hidden state of the
 * depth before, c = [rms(embedding of the k-th next token) ; rms(hidden)], through eh_proj and layers of its own.
 */
import { gatherColumns, gatherSequence, scatterSequence } from "../../parallel/index.ts";
import {
	joinColumns,
	linear,
	type Parameter,
	ResidualSum,
	recompute,
	type Tape,
	type Tensor,
} from "../../tensor/index.ts";
import { runLayer } from "./layer.ts";
import { mtpLayers, mtpPrefix, storedDepths } from "./layer-numbering.ts";
import { embedTokens, type ForwardInput, type ModelChunkParts, type Observer } from "./model-chunk.ts";
import { exhaust } from "./nodes.ts";
import { norm } from "./norm.ts";

/**
 * Normed hidden states of depth `depth` (from 0). `ids`: each token's (depth + 1)-th next, i32 [T]. `previous`: normed hidden
 * states_(T/tp)H of the main part or the depth before.
 */
export function mtpDepth(
	tape: Tape,
	parts: ModelChunkParts,
	depth: number,
	ids: Tensor,
	previous: Tensor,
	input: ForwardInput,
	observe?: Observer,
): Tensor {
	const { config } = parts;
	const stored = depth % storedDepths(config);
	const weights = (name: string) => parts.parameter(mtpPrefix(stored) + name);
	tape.begin(`mtp.${depth}`);
	using entering = project(tape, parts, weights, ids, previous);
	observe?.(`mtp.${depth}.eh_proj`, entering);
	const layers = mtpLayers(config, stored);
	const run = (on: Tape, first: Tensor) => {
		let x = ResidualSum.of(first);
		for (const [at, place] of layers.entries()) {
			using before = x;
			x = exhaust(runLayer(on, parts, place, before, input, `mtp.${depth}.layer.${at}`));
			if (!on.replaying) observe?.(`mtp.${depth}.layer.${at}`, x.written());
		}
		return x;
	};
	const again = () => {
		using y = recompute(tape, entering, (on, first) => {
			using x = run(on, first);
			return x.written().share();
		});
		return ResidualSum.of(y);
	};
	const whole = config.recompute?.granularity === "full" && config.recompute.method === "uniform";
	using hidden = whole ? again() : run(tape, entering);
	const normed = norm(tape, { config, weights }, hidden.tensor, "final_layernorm.weight", { sum: hidden });
	observe?.(`mtp.${depth}.final_layernorm`, normed);
	return normed;
}

/** eh_proj([rms(embedding) ; rms(previous)]) of this rank's tokens; eh_proj is column-parallel. */
function project(
	tape: Tape,
	parts: ModelChunkParts,
	weights: (name: string) => Parameter,
	ids: Tensor,
	previous: Tensor,
): Tensor {
	const { config } = parts;
	const { tp } = parts.parallel;
	using embedded = embedTokens(tape, parts, ids);
	using e = norm(tape, { config, weights }, embedded, "enorm.weight");
	using h = norm(tape, { config, weights }, previous, "hnorm.weight");
	using both = joinColumns(tape, [e, h]);
	using everyToken = gatherSequence(tape, both, tp);
	using columns = linear(tape, everyToken, weights("eh_proj.weight"));
	using whole = gatherColumns(tape, columns, tp);
	return scatterSequence(tape, whole, tp);
}
