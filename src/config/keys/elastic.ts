/** Elastic models: one parent, nested submodels, a trained router (docs/spec/elastic.md). */
import { choice, defaulting, integer, list, number, off, optional, path, positiveNumber, text } from "../field.ts";

/** For keys that change the router's shape, or the sizes that its choices mean. */
const router = { model: "router" } as const;
const sizes = (what: string) =>
	optional(list(integer(1)), `Sizes of ${what} to choose from, falling, the parent's first.`, router);
const ratios = (what: string) =>
	optional(list(number(0, 1)), `The same sizes as shares of the parent's ${what}, rounded down.`, router);

export const elasticKeys = {
	flextron: off("Train the language model as an elastic parent: masks on. Needs enable-router.", router),
	"enable-router": off("Build the router that chooses sizes. Needs flextron."),
	"soft-mask": off("Masks weighted by the router's probabilities instead of those of the chosen sizes."),
	"emb-int-list": sizes("hidden-size"),
	"emb-per-list": ratios("hidden-size"),
	"mamba-int-list": sizes("mamba-num-heads"),
	"mamba-per-list": ratios("mamba-num-heads"),
	"mlp-int-list": sizes("moe-ffn-hidden-size"),
	"mlp-per-list": ratios("moe-ffn-hidden-size"),
	"moe-expert-int-list": sizes("num-experts"),
	"moe-expert-per-list": ratios("num-experts"),
	"head-int-list": sizes("num-attention-heads"),
	"head-per-list": ratios("num-attention-heads"),
	"flex-hetero-mamba": off("Every Mamba layer chooses its heads for itself.", router),
	"flex-hetero-ffn": off("Every MoE layer chooses the width of its experts for itself.", router),
	"flex-hetero-moe-expert": off("Every MoE layer chooses its experts for itself.", router),
	"flex-hetero-head": off("Every attention layer chooses its heads for itself.", router),
	"add-skipping": off("Choose how many layers of layer-ranking-list are left out.", router),
	"layer-ranking-list": optional(
		list(integer(0)),
		"Layers that may be left out, by their numbers from 0, least important first.",
		router,
	),
	"budget-list": defaulting(
		list(positiveNumber),
		[1],
		"Budgets that are trained: shares of the parent, or GB.",
		router,
	),
	"budget-probs": optional(list(number(0)), "How often each budget is drawn; unset: equally often."),
	"original-model-sample-prob": defaulting(
		number(0, 1),
		0.33,
		"Probability that a microbatch has the parent's own budget.",
	),
	"budget-type": defaulting(
		choice(["param", "mem"]),
		"param",
		"Quantity that a budget limits: parameters, as a share of the parent's, or memory, in GB.",
	),
	"param-budget-target": optional(
		choice(["active", "total"]),
		"Parameters that count: those of a token, or all. Unset: the memory profile's, which is active.",
	),
	"memory-profile": defaulting(text, "bf16", "Bytes of an element: bf16, fp8_kv, fp8_kv_ssm, fp8_all, int8, fp4."),
	"memory-profile-path": optional(path, "YAML file with further memory profiles."),
	"bpe-params": optional(positiveNumber, "Bytes of a parameter, instead of the profile's."),
	"bpe-kv-cache": optional(positiveNumber, "Bytes of an element of keys and values, instead of the profile's."),
	"bpe-ssm-cache": optional(positiveNumber, "Bytes of an element of Mamba states, instead of the profile's."),
	"bpe-max-buffer": optional(positiveNumber, "Bytes of an element of experts' rows, instead of the profile's."),
	"prefill-chunk-size": defaulting(integer(1), 16384, "Tokens that a memory budget reads at once."),
	"mem-infer-seq-len": defaulting(integer(1), 131072, "Sequence length of a memory budget."),
	"mem-batch-size": defaulting(integer(1), 1, "Sequences of a memory budget."),
	"router-inter-dim": defaulting(integer(1), 128, "Hidden width of the router's networks.", router),
	"router-std": defaulting(positiveNumber, 0.1, "Standard deviation of the router's initial weights."),
	"normalize-router-logits": off("Divide the logits of Mamba heads, experts and their widths by their deviation."),
	"linear-scaler-start": defaulting(number(0), 1, "Factor of the router's logits in the first iteration."),
	"linear-scaler-end": defaulting(number(0), 10, "Factor of the router's logits in the last iteration."),
	"tau-init": defaulting(positiveNumber, 1, "Temperature of the router's samples in the first iteration."),
	"tau-decay": defaulting(positiveNumber, 0.9999, "Factor of the temperature in every iteration."),
	"hard-sample-th": defaulting(number(0, 1), 0.996, "A sample is one-hot when a uniform number is above this."),
	"loss-alpha": defaulting(number(0), 1, "Weight of a token's budget loss."),
	"lr-mult-router": defaulting(positiveNumber, 1, "Factor of the router's learning rate."),
	"freeze-router": off("The router does not train, and there is no budget loss."),
	"freeze-model": off("The router alone trains."),
	"is-flex-eval": off("Evaluate at override-selected-budget alone instead of at every budget."),
	"override-selected-budget": optional(list(positiveNumber), "Budget of evaluations; the first of the list is read."),
	"flextron-compat": off(
		"Megatron's formulas and masks where this program's differ (docs/spec/elastic.md), to compare numbers.",
	),
	"router-gbs": defaulting(integer(1), 32, "Modulus of Megatron's noise seeds.", {
		noEffect: "noise follows the seed and the microbatch's place",
	}),
	"router-beta": defaulting(number(0), 1, "Factor of a negative budget loss.", {
		noEffect: "the budget loss is never negative",
	}),
} as const;
