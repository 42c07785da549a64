/** Distillation: the language model learns a teacher's distribution of the next token (docs/spec/elastic.md §11). */
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import { HybridModel } from "../../models/language/model.ts";
import { type PipelineSegment, segmentsOf, segmentsOfStage } from "../../models/language/pipeline-segments.ts";
import { axpby, Tensor } from "../../tensor/index.ts";
import type { ElasticConfig } from "../elastic/config.ts";
import { parentBudget } from "../elastic/router/budget-loss.ts";
import { labelOf } from "../elastic/router/network.ts";
import type { Guest, GuestStep, HeadView, LossTerm, RankGuest, RankModules, StepGuest, Variant } from "../guest.ts";
import { HiddenPairs, type PairsInStep, requireKept, segmentOf } from "./hidden-pairs.ts";
import { type HiddenPair, readSettings } from "./settings.ts";
import { type DistillationOptions, distillationLoss, loadTeacher, type Teacher } from "./teacher.ts";
import { teacherConfiguration } from "./teacher-model.ts";

/** KL divergence of a token's distribution from the teacher's. */
export const distillationLossName = "logits distillation loss";
/** Mean of the losses of layers in between. */
const hiddenLossName = "intermediate distillation loss";
/** The distillation and the language model's loss by their weights, as Megatron names their sum. */
const totalLossName = "total loss";
/** The same of microbatches of the parent's budget, and of others. */
const totalOf = ({ whole }: Pick<Variant, "whole">) => `kd loss (${whole ? "full" : "budget"})`;

/** --export-kd-teacher-load and --self-distillation; null: the model learns from labels alone. */
export function distillationOf(c: TrainingConfiguration, elastic: ElasticConfig | null): Guest | null {
	if (c.exportKdTeacherLoad === null && !c.selfDistillation) return null;
	const teacher = c.selfDistillation ? "self" : "frozen";
	const own = c.selfDistillation ? c : teacherConfiguration(c);
	const model = own === c ? null : hybridConfig(own);
	const student = hybridConfig(c);
	const settings =
		c.exportKdCfg === null
			? { temperature: c.exportKdTemperature, alpha: c.exportKdAlpha }
			: readSettings(c.exportKdCfg, student, model ?? student);
	return distillation({ teacher, model, ...settings }, elastic);
}

/** `elastic`: the student's; null: it is not elastic. */
export function distillation(options: DistillationOptions, elastic: ElasticConfig | null): Guest {
	const balances = (options.pairs ?? []).length > 0 || (options.rescaled ?? null) !== null;
	return {
		...(balances && { pools: "export-kd-cfg weighs the losses of distillation by a microbatch's sums of them" }),
		losses: (model) => {
			const budgets = elastic === null ? [] : [...elastic.budgets, parentBudget(elastic, model)];
			const ofBudgets = new Set(budgets.map((budget) => `${distillationLossName} ${labelOf(budget)}`));
			const ofPairs = (options.pairs ?? []).length > 0 ? [hiddenLossName] : [];
			const totals = elastic === null ? [] : [totalOf({ whole: true }), totalOf({ whole: false })];
			return [distillationLossName, ...ofPairs, totalLossName, ...totals, ...ofBudgets].map((name) => ({
				name,
				trainingOnly: true,
				partial: true,
			}));
		},
		open: ({ language, segments }) => language && rankDistillation(options, language, segments),
	};
}

/** The guest on a rank, with the teacher of its student; a frozen one's weights are loaded later. */
function rankDistillation(
	options: DistillationOptions,
	{ module: student, groups: { stages } }: NonNullable<RankModules["language"]>,
	segments: readonly PipelineSegment[],
): RankDistillation {
	const { teacher, model: other, rescaled = null, pairs = [] } = options;
	requireKept(pairs, student.config);
	const { device, config, parallel } = student;
	const frozen = teacher === "frozen";
	const ofTeacher = frozen ? segmentsOfTeacher(other ?? null, pairs, segments) : segments;
	// Groups matter to pipelines alone, which cut the teacher by layers.
	const alone = ({ pattern }: HybridConfig) => ({ recompute: null, blocks: pattern.map(() => 1) });
	const own = segmentsOfStage(ofTeacher, stages.rank, stages.size);
	const model = frozen
		? new HybridModel(device, { ...(other ?? config), ...alone(other ?? config) }, { frozen, parallel, segments: own })
		: student;
	const taught: Teacher = { ...options, model, rescaled, pairs };
	return new RankDistillation(taught, new HiddenPairs(taught, stages, segments, ofTeacher));
}

/**
 * Segments of a teacher: the student's, or of `other` layers as many, as even as they can be. Layers come forward to the chunk of the
 * student's layers that learn from them.
 */
function segmentsOfTeacher(
	other: HybridConfig | null,
	pairs: readonly HiddenPair[],
	segments: readonly PipelineSegment[],
): PipelineSegment[] {
	const layers = other?.pattern.length ?? segments.at(-1)!.end;
	let begin = 0;
	const lengths = segments.map(({ end }, index) => {
		const even = other === null ? end : Math.floor(((index + 1) * layers) / segments.length);
		const wanted = pairs
			.filter(({ student, teacher }) => teacher.norm !== "final" && segmentOf(student, segments) <= index)
			.map(({ teacher }) => teacher.layer + 1);
		const length = Math.max(begin, even, ...wanted) - begin;
		begin += length;
		return length;
	});
	return segmentsOf(lengths);
}

export class RankDistillation implements RankGuest {
	readonly modules: NonNullable<RankGuest["modules"]>;

	constructor(
		readonly teacher: Teacher,
		private readonly pairs: HiddenPairs,
	) {
		this.modules = teacher.teacher === "frozen" ? [{ module: teacher.model, trained: null }] : [];
	}

	async load(c: TrainingConfiguration): Promise<void> {
		await loadTeacher(c, this.teacher.model);
	}

	beforeStep({ training, variant, microbatches }: GuestStep): StepGuest | null {
		if (!training) return null;
		const { teacher } = this;
		/** With self-distillation a microbatch of the whole model is its own teacher. */
		const teaches = (microbatch: number) => teacher.teacher === "frozen" || variant(microbatch)?.whole === false;
		const pairs = this.pairs.inStep(() => [...microbatches.keys()].filter(teaches));
		return {
			companions: (microbatch) =>
				teaches(microbatch) ? [{ width: teacher.model.config.hiddenSize }, ...this.pairs.companions] : [],
			beforeChunk: (view) => (teaches(view.microbatch) ? pairs.beforeChunk(view) : []),
			observer: (view) => (teaches(view.microbatch) ? pairs.observer(view) : null),
			share: (microbatch) => (teaches(microbatch) ? 1 - teacher.alpha : 1),
			losses: (pass) => (teaches(pass.microbatch) ? lossesOf(teacher, pairs, pass, variant(pass.microbatch)) : []),
			afterBackward: () => pairs.settle(),
			[Symbol.dispose]: () => pairs[Symbol.dispose](),
		};
	}
}

/** The distillation's losses with their weights, also under the names of the microbatch's variant. */
function lossesOf(teacher: Teacher, pairs: PairsInStep, pass: HeadView, variant: Variant | null): LossTerm[] {
	const { tape, companions, tokenWeights, input, own } = pass;
	const { logits, loss: ofLabels } = pass.nextToken();
	const loss = own(distillationLoss(tape, teacher, companions[0]!, logits));
	const balanced = teacher.pairs.length > 0 || teacher.rescaled !== null ? balance(teacher, pairs, pass, loss) : null;
	const weight = balanced?.weight ?? teacher.alpha;
	const gradient = own(Tensor.empty(tape.device, tokenWeights.shape));
	axpby(tokenWeights, gradient, weight, 0);
	const term = { name: distillationLossName, loss, mask: input.mask, gradient };
	let total = balanced?.total;
	if (!total) {
		const sum = own(Tensor.empty(tape.device, loss.shape));
		axpby(loss, sum, weight, 0);
		axpby(ofLabels, sum, 1 - weight, 1);
		total = { ...term, name: totalLossName, loss: sum, gradient: null };
	}
	const ofVariant = variant && [
		{ ...total, name: totalOf(variant) },
		{ ...term, name: `${distillationLossName} ${variant.label}`, gradient: null },
	];
	return [term, ...(balanced?.hidden ?? []), total, ...(ofVariant ?? [])];
}

/**
 * Model Optimizer's balance of a microbatch's losses, each a sum over its tokens: the pairs' loss counts as much as the divergence, and
 * both, where that is wanted, as much as the language model's. The ratios have no gradient.
 */
function balance(
	{ alpha, rescaled, pairs: { length } }: Teacher,
	pairs: PairsInStep,
	pass: HeadView,
	loss: Tensor,
): { readonly weight: number; readonly total: LossTerm; readonly hidden: LossTerm[] } {
	const { divergence, labels, hidden, tokens } = pairs.sums(pass, loss, pass.nextToken().loss);
	const ratio = hidden > 0 ? divergence / hidden : 1;
	const taught = divergence + ratio * hidden;
	const weight = rescaled === null ? alpha : rescaled * (taught > 0 && labels > 0 ? labels / taught : 1);
	pairs.weigh(pass.microbatch, ratio * weight);
	const mean = (name: string, sum: number): LossTerm => {
		const one = (value: number) => pass.own(Tensor.from(pass.tape.device, Float32Array.of(value)));
		return { name, loss: one(sum / Math.max(1, tokens)), mask: one(tokens), gradient: null };
	};
	const total = mean(totalLossName, weight * taught + (1 - alpha) * labels);
	return { weight, total, hidden: length > 0 ? [mean(hiddenLossName, hidden)] : [] };
}
