/** A frozen teacher beside the model that trains (docs/spec/elastic.md §11). */

import { languageModelPrefix } from "../models/hybrid/layer-places.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { wordEmbedding } from "../models/hybrid/names.ts";
import { exhaust } from "../models/hybrid/nodes.ts";
import type { ForwardInput } from "../models/hybrid/stage.ts";
import { gatherSequence } from "../parallel/tensor-parallel.ts";
import { klDivergence, type TeacherLogits } from "../tensor/ops/kl-divergence.ts";
import { gemm } from "../tensor/ops/linear.ts";
import { Tape } from "../tensor/tape.ts";
import { type FloatDtype, Tensor } from "../tensor/tensor.ts";

export interface DistillationOptions {
	readonly temperature: number;
	/** Weight of the divergence; the language model's loss has the rest. */
	readonly alpha: number;
}

export interface Teacher extends DistillationOptions {
	/** Frozen, cut as the student is, of one stage. */
	readonly model: HybridModel;
}

/** Tokens whose teacher logits are in memory at once. */
const tokensAtOnce = 1024;

/** The teacher's normed hidden states of all tokens of a microbatch, u_TH, at full size. `input` for its own tape. */
export function teacherHidden({ model }: Teacher, input: (tape: Tape) => ForwardInput): Tensor {
	const tape = new Tape(model.device, { recording: false });
	using own = exhaust(model.stages[0]!.hidden(tape, input(tape), null));
	return gatherSequence(tape, own, model.parallel.tp);
}

/** The divergence_T of the student's logits_T(V/tp) from the teacher's of its hidden states. */
export function distillationLoss(tape: Tape, teacher: Teacher, hidden: Tensor, logits: Tensor): Tensor {
	const { model, temperature } = teacher;
	const { tp } = model.parallel;
	return klDivergence(tape, logits, logitsOf(model, hidden), {
		temperature,
		shard: model.vocabularyShard,
		tokensAtOnce,
		...(tp.size > 1 && {
			gather: (own: Tensor) => {
				const all = Tensor.empty(own.device, [tp.size, ...own.shape.slice(1)]);
				tp.allGather(own, all).wait();
				return all;
			},
		}),
	});
}

function logitsOf({ config, parameters }: HybridModel, hidden: Tensor): TeacherLogits {
	const name = config.tieWordEmbeddings ? wordEmbedding : `${languageModelPrefix}output_layer.weight`;
	const { value: weight } = parameters.get(name);
	return {
		of: (first, tokens) => {
			using rows = hidden.rowsFrom(first, tokens);
			const logits = Tensor.empty(hidden.device, [tokens, weight.rows], hidden.dtype as FloatDtype);
			gemm(hidden.device, { tensor: rows, transposed: false }, { tensor: weight, transposed: true }, logits);
			return logits;
		},
		keep: [hidden],
	};
}
