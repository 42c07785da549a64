/** The teacher of a distilled model: a frozen model, or an elastic parent's own unmasked weights (docs/spec/elastic.md §11). */

import type { Sampled } from "../elastic/router/router.ts";
import { languageModelPrefix } from "../models/language/layer-numbering.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { ForwardInput } from "../models/language/model-chunk.ts";
import { wordEmbedding } from "../models/language/names.ts";
import { exhaust } from "../models/language/nodes.ts";
import { gatherSequence } from "../parallel/index.ts";
import { type FloatDtype, gemm, klDivergence, Tape, type TeacherLogits, Tensor } from "../tensor/index.ts";

export interface DistillationOptions {
	/** frozen: another model of the same sizes. self: the elastic model's own weights of this step, without masks. */
	readonly teacher: "frozen" | "self";
	readonly temperature: number;
	/** Weight α of the divergence from the teacher; the language model loss has weight 1 − α. */
	readonly alpha: number;
}

export interface Teacher extends DistillationOptions {
	/** Sharded as the student is; with self-distillation the student itself. */
	readonly model: HybridModel;
}

/**
 * Whether a microbatch is distilled. With self-distillation a microbatch at the parent's own size is not: it is its own teacher.
 */
export function teaches({ teacher }: DistillationOptions, elastic: Sampled | null): boolean {
	return teacher === "frozen" || (elastic !== null && !elastic.draw.budget.parent);
}

/** Number of tokens whose teacher logits are in memory at once. */
const tokensAtOnce = 1024;

/**
 * The teacher's hidden states_(T/tp)H after chunk `chunk` of this rank, at full size; after the last chunk normed and gathered to all tokens,
 * u_TH. `entered`: the chunk's input from the chunk before. `input`: on the teacher's own tape.
 */
export function teacherHidden(
	{ model }: Teacher,
	chunk: number,
	input: (tape: Tape) => ForwardInput,
	entered: Tensor | null,
): Tensor {
	const tape = new Tape(model.device, { recording: false });
	const own = exhaust(model.chunks[chunk]!.hidden(tape, input(tape), entered));
	if (!model.chunks[chunk]!.segment.hasHead) return own;
	using normed = own;
	return gatherSequence(tape, normed, model.parallel.tp);
}

/** KL divergence_T of the student's logits_T(V/tp) from the teacher's, whose logits are computed from its hidden states. */
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
