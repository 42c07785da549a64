/** The teacher of a distilled model: a frozen model, or an elastic parent's own unmasked weights (docs/spec/elastic.md §11). */

import { loadModel } from "../../checkpoint/index.ts";
import { requireSameModel } from "../../config/same-model.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { languageModelPrefix } from "../../models/language/layer-numbering.ts";
import type { HybridModel } from "../../models/language/model.ts";
import type { ForwardInput, Observer } from "../../models/language/model-chunk.ts";
import { wordEmbedding } from "../../models/language/names.ts";
import { exhaust } from "../../models/language/nodes.ts";
import { gatherSequence } from "../../parallel/index.ts";
import { type FloatDtype, gemm, klDivergence, Tape, type TeacherLogits, Tensor } from "../../tensor/index.ts";
import type { HiddenPair } from "./settings.ts";
import { openTeacher, teacherConfiguration } from "./teacher-model.ts";

export interface DistillationOptions {
	/** frozen: another model. self: the elastic model's own weights of this step, without masks. */
	readonly teacher: "frozen" | "self";
	readonly temperature: number;
	/** Weight α of the distillation; the language model's loss has weight 1 − α. */
	readonly alpha: number;
	/** A microbatch's distillation is made as large as its language model's loss, and multiplied by this; absent: it has weight α. */
	readonly rescaled?: number | null;
	/** Layers in between that learn from the teacher's; default: none. */
	readonly pairs?: readonly HiddenPair[];
	/** Of a frozen teacher with other layers or sizes than the student; absent: it has the student's. */
	readonly model?: HybridConfig | null;
}

export interface Teacher extends Omit<DistillationOptions, "model" | "rescaled" | "pairs"> {
	readonly rescaled: number | null;
	readonly pairs: readonly HiddenPair[];
	/** Sharded over the student's ranks; with self-distillation the student itself. */
	readonly model: HybridModel;
}

/**
 * Reads this rank's part of the teacher's weights. A router in the checkpoint is left out: the teacher is the parent at full size.
 * Throws a UserError for a checkpoint of another model.
 */
export async function loadTeacher(c: TrainingConfiguration, teacher: HybridModel): Promise<void> {
	const path = c.exportKdTeacherLoad;
	if (path === null) return;
	const model = teacherConfiguration(c);
	using source = openTeacher(c, model === c ? null : model.hybridLayerPattern);
	requireSameModel(path, { ...source.model, flextron: false }, { ...model });
	await source.prepare?.();
	loadModel(teacher, source.weights, true);
}

/** Number of tokens whose teacher logits are in memory at once. */
const tokensAtOnce = 1024;

/**
 * The teacher's hidden states_(T/tp)H after a chunk of this rank, at full size; after the last chunk normed and gathered to all tokens,
 * u_TH. `entered`: the chunk's input from the chunk before; null for the first one. `input`: on the teacher's own tape.
 */
export function teacherHidden(
	{ model }: Teacher,
	place: number,
	input: (tape: Tape) => ForwardInput,
	entered: Tensor | null,
	observe?: Observer,
): Tensor {
	const tape = new Tape(model.device, { recording: false });
	const chunk = model.chunks[place]!;
	if (entered) observe?.("entered", entered);
	const own = exhaust(chunk.hidden(tape, input(tape), entered, observe));
	if (!chunk.segment.hasHead) return own;
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
