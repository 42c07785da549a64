/** Distillation: the language model learns a teacher's distribution of the next token (docs/spec/elastic.md §11). */
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import { HybridModel } from "../../models/language/model.ts";
import { type PipelineSegment, segmentsOf, segmentsOfStage } from "../../models/language/pipeline-segments.ts";
import type { Group } from "../../parallel/index.ts";
import { axpby, Tensor } from "../../tensor/index.ts";
import type { ElasticConfig } from "../elastic/config.ts";
import { parentBudget } from "../elastic/router/budget-loss.ts";
import { labelOf } from "../elastic/router/network.ts";
import type { Guest, GuestStep, HeadView, LossTerm, RankGuest, RankModules, StepGuest } from "../guest.ts";
import { type DistillationOptions, distillationLoss, loadTeacher, type Teacher, teacherHidden } from "./teacher.ts";
import { teacherConfiguration } from "./teacher-model.ts";

/** KL divergence of a token's distribution from the teacher's. */
export const distillationLossName = "logits distillation loss";
/** The divergence and the language model's loss by their weights, as Megatron names their sum. */
const totalLossName = "total loss";

/** --export-kd-teacher-load and --self-distillation; null: the model learns from labels alone. */
export function distillationOf(c: TrainingConfiguration, elastic: ElasticConfig | null): Guest | null {
	if (c.exportKdTeacherLoad === null && !c.selfDistillation) return null;
	const teacher = c.selfDistillation ? "self" : "frozen";
	const own = c.selfDistillation ? c : teacherConfiguration(c);
	// Groups matter to pipelines alone, which cut the teacher by layers.
	const model =
		own === c ? null : hybridConfig({ ...own, hybridLayerPattern: own.hybridLayerPattern.replaceAll(/[[\]]/g, "") });
	return distillation({ teacher, model, temperature: c.exportKdTemperature, alpha: c.exportKdAlpha }, elastic);
}

/** `elastic`: the student's; null: it is not elastic. */
export function distillation(options: DistillationOptions, elastic: ElasticConfig | null): Guest {
	return {
		losses: (model) => {
			const budgets = elastic === null ? [] : [...elastic.budgets, parentBudget(elastic, model)];
			const ofBudgets = new Set(budgets.map((budget) => `${distillationLossName} ${labelOf(budget)}`));
			return [distillationLossName, totalLossName, ...ofBudgets].map((name) => ({
				name,
				trainingOnly: true,
				partial: true,
			}));
		},
		open: ({ language }) => language && new RankDistillation(teacherOf(options, language)),
	};
}

/** The teacher of a student; a frozen one's weights are loaded later. */
function teacherOf(
	options: DistillationOptions,
	{ module: student, groups }: NonNullable<RankModules["language"]>,
): Teacher {
	if (options.teacher === "self") return { ...options, model: student };
	const { device, config, parallel, chunks } = student;
	const own = options.model ?? null;
	const segments = own ? segmentsOfTeacher(own, chunks.length, groups.stages) : chunks.map(({ segment }) => segment);
	const model = new HybridModel(device, { ...(own ?? config), recompute: null }, { frozen: true, parallel, segments });
	return { ...options, model };
}

/** This rank's segments of a teacher that has other layers than the student, cut into as many as evenly as they can be. */
function segmentsOfTeacher({ pattern }: HybridConfig, chunks: number, stages: Group): PipelineSegment[] {
	const count = chunks * stages.size;
	const begin = (segment: number) => Math.floor((segment * pattern.length) / count);
	const lengths = Array.from({ length: count }, (_, segment) => begin(segment + 1) - begin(segment));
	return segmentsOfStage(segmentsOf(lengths), stages.rank, stages.size);
}

export class RankDistillation implements RankGuest {
	readonly modules: NonNullable<RankGuest["modules"]>;

	constructor(readonly teacher: Teacher) {
		this.modules = teacher.teacher === "frozen" ? [{ module: teacher.model, trained: null }] : [];
	}

	async load(c: TrainingConfiguration): Promise<void> {
		await loadTeacher(c, this.teacher.model);
	}

	beforeStep({ training, variant }: GuestStep): StepGuest | null {
		if (!training) return null;
		const { teacher } = this;
		/** With self-distillation a microbatch of the whole model is its own teacher. */
		const teaches = (microbatch: number) => teacher.teacher === "frozen" || variant(microbatch)?.whole === false;
		return {
			companions: (microbatch) => (teaches(microbatch) ? [teacher.model.config.hiddenSize] : []),
			beforeChunk: ({ microbatch, place, input, companions }) =>
				teaches(microbatch) ? [teacherHidden(teacher, place, input, companions[0] ?? null)] : [],
			share: (microbatch) => (teaches(microbatch) ? 1 - teacher.alpha : 1),
			losses: (pass) => (teaches(pass.microbatch) ? divergence(teacher, pass, variant(pass.microbatch)?.label) : []),
		};
	}
}

/** The divergence from the teacher with weight α, also under the name of the microbatch's variant. */
function divergence(teacher: Teacher, pass: HeadView, label: string | undefined): LossTerm[] {
	const { tape, companions, tokenWeights, input, own } = pass;
	const { logits, loss: ofLabels } = pass.nextToken();
	const loss = own(distillationLoss(tape, teacher, companions[0]!, logits));
	const gradient = own(Tensor.empty(tape.device, tokenWeights.shape));
	axpby(tokenWeights, gradient, teacher.alpha, 0);
	const total = own(Tensor.empty(tape.device, loss.shape));
	axpby(loss, total, teacher.alpha, 0);
	axpby(ofLabels, total, 1 - teacher.alpha, 1);
	const term = { name: distillationLossName, loss, mask: input.mask, gradient };
	const terms = [term, { ...term, name: totalLossName, loss: total, gradient: null }];
	return label === undefined
		? terms
		: [...terms, { ...term, name: `${distillationLossName} ${label}`, gradient: null }];
}
