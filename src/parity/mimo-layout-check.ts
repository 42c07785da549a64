/** Whether a mimo-* reference folder can run on a layout: known before a rank starts. */
import { UserError } from "../native/errors.ts";
import type { NamedTopology } from "../parallel/layout.ts";
import { requireCuts } from "./layout-cuts.ts";
import type { MimoGoldenConfig } from "./mimo-golden.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "./mimo-model.ts";
import { type Plan, planOf } from "./verify/plan.ts";

/**
 * How the reference's samples are dealt out on a layout. Its microbatches hold one sample; where several encoder lanes
 * serve a language lane, as many are put together, which changes neither the loss nor a balancing loss of single
 * sequences. Throws a UserError that names what the layout cannot cut.
 */
export function planOfGolden(layout: NamedTopology, config: MimoGoldenConfig): Plan {
	requireCuts(layout, goldenLanguageConfig(config, "f32"), goldenEncoderConfig(config, "f32"));
	const { data, language_model: l } = config;
	const samples = data.lanes * data.microbatches_per_lane;
	const plan = planOf(layout, { samples, microBatchSize: 1, sequenceLength: l.sequence_length });
	if (plan.microBatchSize > 1 && l.moe.load_balancing_type === "aux_loss") {
		throw new UserError(
			`Layout ${layout.name} needs microbatches of ${plan.microBatchSize} samples; aux_loss is another loss then than the reference's.`,
		);
	}
	return plan;
}

/** The factor of a "corrected" folder counts encoder ranks, so another number of them has another trail. */
export function checkParticipation(path: string, config: MimoGoldenConfig, encoderRanks: number): void {
	const wanted = config.layout.encoder.data_parallel;
	if (config.encoder_grad_participation !== "corrected" || encoderRanks === wanted) return;
	throw new UserError(
		`${path} scales the encoder's gradient by ${wanted} data-parallel encoder ranks over those that saw images, and this layout has ${encoderRanks}: its losses would differ.`,
	);
}
