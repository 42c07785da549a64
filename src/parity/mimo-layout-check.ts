/** Whether a mimo-* reference folder can run on a layout: known before a rank starts. */
import { UserError } from "../native/errors.ts";
import type { NamedTopology } from "../parallel/layout.ts";
import type { MimoGoldenConfig } from "./mimo-golden.ts";
import { type Plan, planOf } from "./verify/plan.ts";

type Cut = readonly [field: string, length: number];

/** What the sizes of a layout cut, by the fields of config.json. */
function cutsOf({ topology }: NamedTopology, config: MimoGoldenConfig): readonly (readonly [string, number, Cut[]])[] {
	const { language_model: l, vision, projector } = config;
	const { tensor, expert, expertTensor } = topology.language.shape;
	const has = (symbol: (typeof l.pattern)[number]) => l.pattern.includes(symbol);
	const language: Cut[] = [
		["padded_vocab_size", l.padded_vocab_size],
		...(has("*")
			? ([
					["attention.num_attention_heads", l.attention.num_attention_heads],
					["attention.num_query_groups", l.attention.num_query_groups],
				] as const)
			: []),
		...(has("M")
			? ([
					["mamba.num_heads", l.mamba.num_heads],
					["mamba.num_groups", l.mamba.num_groups],
				] as const)
			: []),
		...(has("-") ? ([["mlp.ffn_hidden_size", l.mlp.ffn_hidden_size]] as const) : []),
		...(has("E") ? ([["moe.shared_expert_hidden_size", l.moe.shared_expert_hidden_size]] as const) : []),
	];
	const encoder: Cut[] = [
		["vision.hidden_size", vision.hidden_size],
		["vision.num_attention_heads", vision.num_attention_heads],
		["vision.ffn_hidden_size", vision.ffn_hidden_size],
		projector.type === "affine"
			? ["projector.output_size", projector.output_size]
			: ["projector's inner size", 4 * projector.input_size],
	];
	return [
		["the encoder's tp", topology.encoder?.shape.tensor ?? 1, encoder],
		["the language model's tp", tensor, language],
		["ep", expert, has("E") ? [["moe.num_experts", l.moe.num_experts]] : []],
		["etp", expertTensor, has("E") ? [["moe.ffn_hidden_size", l.moe.ffn_hidden_size]] : []],
	];
}

/**
 * How the reference's samples are dealt out on a layout. Its microbatches hold one sample; where several encoder lanes
 * serve a language lane, as many are put together, which changes neither the loss nor a balancing loss of single
 * sequences. Throws a UserError that names what the layout cannot cut.
 */
export function planOfGolden(layout: NamedTopology, config: MimoGoldenConfig): Plan {
	for (const [what, size, cuts] of cutsOf(layout, config)) {
		const uneven = cuts.filter(([, length]) => length % size !== 0).map(([field, length]) => `${field} (${length})`);
		if (uneven.length > 0) {
			throw new UserError(
				`Layout ${layout.name}: ${what} is ${size}; allowed with this reference is a divisor of ${uneven.join(" and of ")}.`,
				2,
			);
		}
	}
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
