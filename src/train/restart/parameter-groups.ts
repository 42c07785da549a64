/**
 * The optimizer's groups as Megatron describes them in a checkpoint (docs/spec/checkpoint.md §3.6): for each module its
 * dense parameters, with and without weight decay, then its experts'.
 */
import type { Json } from "../../checkpoint/index.ts";
import { hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { languageLora, visionLora } from "../../models/lora.ts";

/** `step`: optimizer steps taken; the values are those of the last one. */
export function parameterGroups(
	c: TrainingConfiguration,
	now: { readonly step: number; readonly learningRate: number; readonly weightDecay: number },
): Json {
	const group = (expert: boolean, decays: boolean): Json => ({
		is_expert_parallel: expert,
		default_config: true,
		wd_mult: decays ? 1 : 0,
		lr_mult: 1,
		is_decoupled_lr: false,
		max_lr: c.lr,
		min_lr: c.minLr,
		lr: now.learningRate,
		bias_correction: true,
		betas: [c.adamBeta1, c.adamBeta2],
		eps: c.adamEps,
		weight_decay: decays ? now.weightDecay : 0,
		step: now.step,
	});
	const dense = [group(false, true), group(false, false)];
	const encoder = hasEncoder(c) && !(c.freezeVit && c.freezeProjection);
	const trainsExperts = c.loraRank === null || c.loraTargetModules.some((module) => module.startsWith("experts."));
	const experts = c.numExperts > 0 && trainsExperts ? [[group(true, true)]] : [];
	// Adapters are matrices.
	const language = c.loraRank === null ? dense : dense.slice(0, 1);
	return {
		...(encoder
			? { radio_encoder: [c.freezeVit || visionLora(c, "vision_model") !== null ? dense.slice(0, 1) : dense] }
			: {}),
		...(c.freezeLm || languageLora(c)?.targets.length === 0 ? {} : { language: [language, ...experts] }),
	};
}
