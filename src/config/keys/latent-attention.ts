/** Multi-latent attention layers (docs/spec/families.md §2.4). */
import { boolean, choice, defaulting, derived, integer, optional, positiveNumber } from "../field.ts";

export const latentAttentionKeys = {
	"multi-latent-attention": derived(
		boolean,
		"true when the pattern has +",
		"Attention through low-rank latents, which + of the pattern has; the pattern wins.",
		{ model: false },
	),
	"q-lora-rank": optional(
		integer(1),
		"Width of the queries' latent; unset: queries are projected from hidden states.",
		{ place: "latent.queryRank" },
	),
	"kv-lora-rank": defaulting(integer(1), 512, "Width of the keys' and values' latent.", {
		place: "latent.keyValueRank",
	}),
	"qk-head-dim": defaulting(integer(1), 128, "Columns of a query or key head that are not rotated.", {
		place: "latent.contentDim",
	}),
	"qk-pos-emb-head-dim": defaulting(
		integer(1),
		64,
		"Columns of a query or key head that rotary embeddings turn, in keys the same for all heads.",
		{ place: "latent.positionDim" },
	),
	"v-head-dim": defaulting(integer(1), 128, "Columns of a value head.", { place: "latent.valueDim" }),
	"latent-norm-epsilon": derived(
		positiveNumber,
		"norm-epsilon",
		"Added to the mean square inside the latents' norms, which qk-layernorm switches on; DeepSeek's is 1e-6.",
	),
	"rope-type": defaulting(
		choice(["rope", "yarn"]),
		"yarn",
		"Rotary embedding of multi-latent attention; yarn scales scores too, by (0.1 mscale-all-dim ln rotary-scaling-factor + 1)².",
	),
} as const;
