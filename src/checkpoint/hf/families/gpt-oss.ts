/**
 * gpt-oss: attention with sinks and biases, in windows in every other layer, and experts in every layer, whose tensors are stacks with
 * the input first and columns of gate and linear half in turn (docs/spec/families.md §2.6, §3).
 */
import { decoderFamily, readWindows, writtenWindows } from "./decoder.ts";
import { fraction, type LayerNames, whole } from "./family.ts";

export const gptOss = decoderFamily({
	modelType: "gpt_oss",
	architecture: "GptOssForCausalLM",
	sizes: {
		...{ hidden_size: 2880, intermediate_size: 2880, num_hidden_layers: 36, num_attention_heads: 64 },
		...{ num_key_value_heads: 8, vocab_size: 201088 },
	},
	maxPositionEmbeddings: 131072,
	headDim: 64,
	defaults: {
		...{ rms_norm_eps: 1e-5, rope_theta: 150000 },
		rope_scaling: { rope_type: "yarn", factor: 32, truncate: false, original_max_position_embeddings: 4096 },
	},
	only: { attention_bias: true, swiglu_alpha: 1.702 },
	activation: "quickGeglu",
	hasExperts: () => true,
	stacks: addExperts,
	read: (values, bad, layers) => ({
		addBiasLinear: true,
		softmaxType: "learnable",
		activationFuncClampValue: fraction(values, "swiglu_limit", 7, bad),
		gluLinearOffset: 1,
		numExperts: whole(values, "num_local_experts", 128, bad),
		moeRouterTopk: whole(values, "num_experts_per_tok", 4, bad),
		moeFfnHiddenSize: whole(values, "intermediate_size", 2880, bad),
		...readWindows(values, bad, layers, {
			size: values.sliding_window === null ? null : whole(values, "sliding_window", 128, bad),
			rule: (layer) => layer % 2 === 0,
		}),
	}),
	write: (c) => ({
		...writtenWindows(c),
		num_local_experts: c.numExperts,
		num_experts_per_tok: c.moeRouterTopk,
		swiglu_limit: c.activationFuncClampValue,
		output_router_logits: false,
	}),
	describes: ({ softmaxType }) => softmaxType === "learnable",
});

function addExperts({ builder, c, logical, foreign }: LayerNames): void {
	const { hiddenSize: h, moeFfnHiddenSize: f, numExperts: experts } = c;
	builder.same(`${logical}mlp.router.weight`, `${foreign}mlp.router.weight`, [experts, h]);
	builder.same(`${logical}mlp.router.bias`, `${foreign}mlp.router.bias`, [experts]);
	const [theirs, mine] = [`${foreign}mlp.experts.`, `${logical}mlp.experts.`];
	builder.addForeign(`${theirs}gate_up_proj`, [experts, h, 2 * f]);
	builder.addForeign(`${theirs}gate_up_proj_bias`, [experts, 2 * f]);
	builder.addForeign(`${theirs}down_proj`, [experts, f, h]);
	builder.addForeign(`${theirs}down_proj_bias`, [experts, h]);
	for (let expert = 0; expert < experts; expert++) {
		const tensor = (name: string, shape: readonly number[]) => {
			builder.addLogical(`${mine}${name}${expert}`, shape);
			return `${mine}${name}${expert}`;
		};
		const fc1 = { weight: tensor("linear_fc1.weight", [2 * f, h]), bias: tensor("linear_fc1.bias", [2 * f]) };
		for (const half of [0, 1]) {
			builder.link({
				logical: fc1.weight,
				logicalRuns: { offset: half * f * h, stride: h },
				foreign: `${theirs}gate_up_proj`,
				foreignRuns: { offset: expert * h * 2 * f + half, stride: 2, step: 2 * f },
				count: f,
				length: h,
			});
			builder.link({
				logical: fc1.bias,
				logicalRuns: { offset: half * f, stride: 1 },
				foreign: `${theirs}gate_up_proj_bias`,
				foreignRuns: { offset: expert * 2 * f + half, stride: 2 },
				count: f,
				length: 1,
			});
		}
		builder.link({
			logical: tensor("linear_fc2.weight", [h, f]),
			logicalRuns: { offset: 0, stride: f },
			foreign: `${theirs}down_proj`,
			foreignRuns: { offset: expert * f * h, stride: 1, step: h },
			count: h,
			length: f,
		});
		const bias = tensor("linear_fc2.bias", [h]);
		builder.rows({ logical: bias, foreign: `${theirs}down_proj_bias`, width: h, rows: 1, foreignRow: expert });
	}
}
