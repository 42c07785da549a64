/** Whether a mimo-* reference folder can run on a layout: known before a rank starts. */

import type { NamedTopology } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { requireCuts } from "../layout-cuts.ts";
import { type Plan, participants, planOf } from "../verify/plan.ts";
import type { MimoGoldenConfig } from "./golden.ts";
import { hasImage, participantsOf } from "./golden-checks.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./model.ts";

/**
 * How the reference's samples are dealt out on a layout. Its microbatches hold one sample, or as many as tensor-parallel
 * ranks can cut, which changes neither the loss nor a balancing loss of single sequences. Throws a UserError that names what the layout cannot cut.
 */
export function planOfGolden(layout: NamedTopology, config: MimoGoldenConfig): Plan {
	requireCuts(layout, goldenLanguageConfig(config, "f32"), goldenEncoderConfig(config, "f32"));
	const { data, language_model: l } = config;
	const samples = data.lanes * data.microbatches_per_lane;
	const plan = planOf(layout, { samples, microBatchSize: 1, sequenceLength: l.sequence_length });
	if (plan.microBatchSize > 1 && l.moe.load_balancing_type === "aux_loss") {
		throw new UserError(
			`Layout ${layout.name} needs microbatches of ${counted(plan.microBatchSize, "sample")}; aux_loss is another loss then than the reference's.`,
		);
	}
	return plan;
}

/** The factor of a "corrected" folder depends on the number of encoder ranks: with another number the losses are others. */
export function checkParticipation(path: string, config: MimoGoldenConfig, plan: Plan): void {
	if (config.encoder_grad_participation !== "corrected") return;
	const scales = `${path} scales the encoder's gradient by ${config.layout.encoder.data_parallel} data-parallel encoder ranks over those that saw images`;
	const ranks = plan.topology.encoders[0]!.lanes;
	if (ranks !== config.layout.encoder.data_parallel) {
		throw new UserError(`${scales}, and this layout has ${ranks}: its losses would differ.`);
	}
	for (let step = 0; step < config.data.steps; step++) {
		const [wanted, found] = [participantsOf(config, step), participants(plan, samplesWithImages(config, step))];
		if (found === wanted) continue;
		throw new UserError(
			`${scales}; in step ${step + 1} layout ${plan.name} has images on ${found} of them instead of ${wanted}: its losses would differ.`,
		);
	}
}

/** Whether each sample of a step has an image, lane after lane. */
export function samplesWithImages(config: MimoGoldenConfig, step: number): boolean[] {
	const { lanes, microbatches_per_lane: perLane } = config.data;
	return Array.from({ length: lanes * perLane }, (_, sample) =>
		hasImage(config, step, Math.floor(sample / perLane), sample % perLane),
	);
}
