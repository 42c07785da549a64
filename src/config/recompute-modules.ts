/** The parts of a layer whose values selective recomputation drops, or offloading moves, by Megatron's names. */
import type { LayerKind } from "./hybrid-pattern.ts";

interface RecomputedPart {
	/** Layers that have the part. */
	readonly layers: readonly LayerKind[];
	/** The values that are not kept, for messages. */
	readonly dropped: string;
}

export const recomputeModules = {
	core_attn: {
		layers: ["attention", "latentAttention", "gdn"],
		dropped: "attention's output; of Gated DeltaNet all between its projections",
	},
	mla_up_proj: {
		layers: ["latentAttention"],
		dropped: "queries, keys and values that are projected from the latents of multi-latent attention",
	},
	layernorm: {
		layers: ["mamba", "gdn", "attention", "latentAttention", "mlp", "moe"],
		dropped: "the output of the norm in front of every layer",
	},
	mamba: { layers: ["mamba"], dropped: "the convolution, the scan and the gated norm of Mamba-2" },
	mlp: { layers: ["mlp"], dropped: "all of a dense MLP" },
	moe: { layers: ["moe"], dropped: "all of a mixture of experts, router and shared expert included" },
	moe_act: {
		layers: ["moe"],
		dropped:
			"the activation between the experts' projections, which is not kept where they are one operation (moe-fused-mlp)",
	},
	shared_experts: { layers: ["moe"], dropped: "all of a shared expert" },
} as const satisfies Readonly<Record<string, RecomputedPart>>;

export type RecomputeModule = keyof typeof recomputeModules;

export const recomputeModuleNames = Object.keys(recomputeModules) as RecomputeModule[];

/** Megatron's names of parts that no layer here has. */
export const foreignRecomputeModules = ["mhc"] as const;

/** The modules of a mixture of experts whose input can wait in the host's memory, by Megatron's names. */
export const offloadModules = ["expert_fc1", "moe_act"] as const;
export type OffloadModule = (typeof offloadModules)[number];
/** Megatron's names of modules whose input stays in device memory here. */
export const foreignOffloadModules = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"] as const;

/** Megatron's default. */
export const defaultRecomputeModules: readonly RecomputeModule[] = ["core_attn"];
