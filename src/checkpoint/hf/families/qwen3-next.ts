/**
 * Qwen3-Next and the text models of Qwen3.5 (docs/spec/families.md §3): Gated DeltaNet in most layers, attention with an output gate
 * in the others, zero-centred norms, experts with a gated shared one or dense MLPs.
 */
import { parseHybridPattern } from "../../../config/hybrid-pattern.ts";
import { decoderFamily } from "./decoder.ts";
import { type Json, type LanguageModelConfiguration, type Refuse, whole } from "./family.ts";
import { hasExperts, readExperts, writtenExperts } from "./qwen3.ts";

const sizes = {
	...{ hidden_size: 2048, num_hidden_layers: 48, num_attention_heads: 16, num_key_value_heads: 2 },
	vocab_size: 151936,
};

/** Depths of multi-token prediction as Qwen's files have them; transformers knows neither the field nor the tensors. */
const ahead = {
	field: "mtp_num_hidden_layers",
	depthOf: () => (name: string) => {
		const [, layer] = /^mtp\.(?:layers\.(\d+)\.)?/.exec(name) ?? [];
		return name.startsWith("mtp.") ? Number(layer ?? 0) : null;
	},
	// Further ones would share all but their layers.
	most: 1,
	places: (_: string, __: number, depth: number) => ({
		own: "mtp.",
		layer: `mtp.layers.${depth}.`,
		names: { enorm: "pre_fc_norm_embedding", hnorm: "pre_fc_norm_hidden", eh_proj: "fc", final_layernorm: "norm" },
	}),
};

const common = {
	ahead,
	maxPositionEmbeddings: 32768,
	headDim: 256,
	defaults: { partial_rotary_factor: 0.25 },
	linearAttention: isLinear,
} as const;

export const qwen3Next = decoderFamily({
	...common,
	modelType: "qwen3_next",
	architecture: "Qwen3NextForCausalLM",
	sizes: { ...sizes, intermediate_size: 5632 },
	only: { attention_bias: false },
	gatedDelta: "joined",
	read: (values, bad) => ({
		...readMixers(values, bad),
		...readExperts(values, bad, { experts: 512, topk: 10, width: 512, normalised: true }),
		...readSharedExpert(values, bad),
	}),
	hasExperts,
	write: (c, kinds) => ({ ...writtenMixers(c), ...writtenExperts(c, kinds), ...writtenSharedExpert(c) }),
	describes: ({ numExperts }) => numExperts > 0,
});

export const qwen35Text = decoderFamily({
	...common,
	modelType: "qwen3_5_text",
	architecture: "Qwen3_5ForCausalLM",
	sizes: {
		...sizes,
		...{ hidden_size: 4096, intermediate_size: 12288, num_hidden_layers: 32, num_key_value_heads: 4 },
		vocab_size: 248320,
	},
	only: { attention_bias: false, attn_output_gate: true },
	gatedDelta: "apart",
	read: readMixers,
	write: writtenMixers,
	describes: ({ numExperts }) => numExperts === 0,
});

export const qwen35MoeText = decoderFamily({
	...common,
	modelType: "qwen3_5_moe_text",
	architecture: "Qwen3_5MoeForCausalLM",
	sizes: { ...sizes, num_hidden_layers: 40, vocab_size: 248320 },
	only: { attention_bias: false, attn_output_gate: true },
	gatedDelta: "apart",
	read: (values, bad) => ({
		...readMixers(values, bad),
		// The class has no field norm_topk_prob, and always divides.
		...readExperts({ ...values, norm_topk_prob: true }, bad, { experts: 256, topk: 8, width: 512, normalised: true }),
		...readSharedExpert(values, bad),
	}),
	hasExperts: () => true,
	write: (c) => {
		const { num_experts, num_experts_per_tok, moe_intermediate_size, output_router_logits } = writtenExperts(c, []);
		const experts = { num_experts, num_experts_per_tok, moe_intermediate_size, output_router_logits };
		return { ...writtenMixers(c), ...experts, ...writtenSharedExpert(c) };
	},
	// The same models as those of Qwen3-Next.
	describes: () => false,
});

/** The layers with Gated DeltaNet: by layer_types, else all but every full_attention_interval-th. */
function isLinear(values: Json, bad: Refuse, layers: number): readonly boolean[] {
	const { layer_types: types } = values;
	if (!Array.isArray(types)) {
		const interval = whole(values, "full_attention_interval", 4, bad);
		return Array.from({ length: layers }, (_, layer) => (layer + 1) % interval !== 0);
	}
	if (types.length !== layers) bad(`layer_types names ${types.length} layers, and the model has ${layers}`);
	return types.map((type, layer) => {
		if (type === "linear_attention" || type === "full_attention") return type === "linear_attention";
		return bad(
			`layer_types[${layer}] is ${JSON.stringify(type)}, and only linear_attention and full_attention can be read`,
		);
	});
}

const linearFields = {
	linearConvKernelDim: ["linear_conv_kernel_dim", 4],
	linearKeyHeadDim: ["linear_key_head_dim", 128],
	linearValueHeadDim: ["linear_value_head_dim", 128],
	linearNumKeyHeads: ["linear_num_key_heads", 16],
	linearNumValueHeads: ["linear_num_value_heads", 32],
} as const satisfies Partial<Record<keyof LanguageModelConfiguration, readonly [string, number]>>;

function readMixers(values: Json, bad: Refuse): Partial<LanguageModelConfiguration> {
	const linear = Object.fromEntries(
		Object.entries(linearFields).map(([key, [name, missing]]) => [key, whole(values, name, missing, bad)]),
	) as Record<keyof typeof linearFields, number>;
	if (linear.linearNumValueHeads % linear.linearNumKeyHeads !== 0) {
		bad("linear_num_value_heads is not a multiple of linear_num_key_heads");
	}
	return { ...linear, qkLayernorm: true, attentionOutputGate: true, applyLayernorm1p: true };
}

function writtenMixers(c: LanguageModelConfiguration): Json {
	const mixers = parseHybridPattern(c.hybridLayerPattern).filter((_, index) => index % 2 === 0);
	return {
		...Object.fromEntries(
			Object.entries(linearFields).map(([key, [name, missing]]) => [
				name,
				c[key as keyof typeof linearFields] ?? missing,
			]),
		),
		layer_types: mixers.map((kind) => (kind === "gdn" ? "linear_attention" : "full_attention")),
		// transformers' default differs, so that a whole head has to be said.
		partial_rotary_factor: c.rotaryPercent,
	};
}

function readSharedExpert(values: Json, bad: Refuse): Partial<LanguageModelConfiguration> {
	return {
		moeSharedExpertIntermediateSize: whole(values, "shared_expert_intermediate_size", 512, bad),
		moeSharedExpertGate: true,
	};
}

function writtenSharedExpert(c: LanguageModelConfiguration): Json {
	return { shared_expert_intermediate_size: c.moeSharedExpertIntermediateSize };
}
