/** Mixture-of-experts layers (docs/spec/language-model.md §4). */
import {
	alwaysOn,
	boolean,
	choice,
	defaulting,
	derived,
	integer,
	list,
	number,
	off,
	optional,
	positiveNumber,
} from "../field.ts";
import { foreignOffloadModules, type OffloadModule, offloadModules } from "../recompute-modules.ts";

export const moeKeys = {
	"num-experts": derived(integer(0), "0 when the pattern has no E; required otherwise", "Routed experts of a layer.", {
		place: "moe.experts",
		aliases: ["num-moe-experts"],
	}),
	"num-experts-per-layer": optional(
		list(integer(1)),
		"Routed experts of every E of the pattern's main part in order, where they differ; unset: num-experts each.",
	),
	"moe-router-topk": defaulting(integer(1), 2, "Experts a token is sent to.", { place: "moe.topk" }),
	"moe-ffn-hidden-size": derived(integer(1), "ffn-hidden-size", "Width of one routed expert.", {
		place: "moe.ffnHiddenSize",
	}),
	"moe-ffn-hidden-size-per-layer": optional(
		list(integer(1)),
		"Width of a routed expert of every E of the pattern's main part in order, where they differ; unset: moe-ffn-hidden-size each.",
	),
	"moe-latent-size": optional(
		integer(1),
		"Width of the rows that routed experts take and return, with a projection of each token before and behind them; unset: hidden-size, and no projections.",
		{ place: "moe.latentSize" },
	),
	"moe-shared-expert-intermediate-size": defaulting(integer(0), 0, "Width of the shared expert; 0: none.", {
		place: "moe.sharedExpertSize",
	}),
	"moe-shared-expert-gate": off("Weigh the shared expert of a token by the sigmoid of a linear layer of it.", {
		place: "moe.sharedExpertGate",
	}),
	"moe-router-score-function": defaulting(
		choice(["softmax", "sigmoid"], ["sqrtsoftplus"]),
		"softmax",
		"Score of an expert from its router logit.",
	),
	"moe-router-pre-softmax": off("Softmax over all experts before the top-k instead of over the chosen ones.", {
		model: "softmax router",
	}),
	"moe-router-topk-scaling-factor": defaulting(positiveNumber, 1, "Factor on the routing weights.", {
		place: "moe.scalingFactor",
		megatron: "unset, which is 1",
	}),
	"moe-router-num-groups": defaulting(integer(1), 1, "Equal blocks of experts for group-limited routing.", {
		place: "moe.groups",
		megatron: "unset, which is 1",
	}),
	"moe-router-group-topk": defaulting(integer(1), 1, "Blocks of experts a token may use.", {
		place: "moe.groupTopk",
		megatron: "unset, which is 1",
	}),
	"moe-router-enable-expert-bias": off("Add a bias per expert to the scores that choose, updated once a step.", {
		place: "moe.expertBias",
	}),
	"moe-router-bias-update-rate": defaulting(number(0), 1e-3, "Step of the expert bias; 0 keeps it fixed.", {
		model: false,
	}),
	"moe-router-force-load-balancing": off(
		"For benchmarks: training passes route by random logits in the place of the router's, so that experts get about equally many tokens; the expert bias is not updated. Every log line says so.",
		{ place: "moe.forceLoadBalancing", model: false },
	),
	"moe-router-dtype": defaulting(choice(["fp32"], ["fp64"]), "fp32", "Precision of router logits and scores.", {
		told: false,
		megatron: "unset, which is the model's",
	}),
	"moe-router-load-balancing-type": defaulting(
		list(
			choice(
				["aux_loss", "seq_aux_loss", "global_aux_loss", "pooled_aux_loss", "sinkhorn", "none"],
				["quantile_balancing"],
			),
		),
		["aux_loss"],
		"Balancing losses, one coefficient in moe-aux-loss-coeff each; pooled_aux_loss is transformers' (output_router_logits), with router_aux_loss_coef as coefficient: one loss of all layers and of the microbatches that data lanes run together; sinkhorn: training evens out the choice of experts instead.",
		{ model: false },
	),
	"moe-aux-loss-coeff": defaulting(list(number(0)), [0], "Coefficients of the balancing losses.", { model: false }),
	"moe-z-loss-coeff": defaulting(number(0), 0, "Coefficient of the router z-loss.", {
		place: "moe.zLossCoefficient",
		model: false,
		megatron: "unset, which is 0",
	}),
	"moe-grouped-gemm": alwaysOn("All experts of a layer in one grouped GEMM."),
	"moe-fused-mlp": defaulting(
		choice(["auto", "on", "off"]),
		"auto",
		"Both products of the experts and the activation between them as one operation, which keeps less for the backward pass; on: an error where it cannot be.",
		{ place: "moe.fused", model: false },
	),
	"moe-mlp-glu-interleave-size": optional(
		integer(1),
		"Rows of the blocks in which the experts' gate and linear halves alternate in memory; checkpoints hold whole halves. Unset: whole halves.",
		{ model: false },
	),
	"moe-single-grouped-weight": off("One parameter for all experts of a rank.", {
		noEffect: "a rank's experts are always one tensor a projection, which checkpoints name one by one",
	}),
	"moe-single-grouped-bias": off("One parameter for the biases of all experts of a rank.", {
		noEffect: "a rank's biases are always one tensor a projection, which checkpoints name one by one",
	}),
	"fine-grained-activation-offloading": defaulting(
		boolean,
		false,
		"Keep the inputs of offload-modules in the host's memory between forward and backward passes; copies run beside other work, at the speed of the host's link, which mimo plan does not count.",
		{ model: false },
	),
	"offload-modules": optional(
		list<OffloadModule>(choice(offloadModules, foreignOffloadModules)),
		"With fine-grained-activation-offloading: expert_fc1, the rows of experts; moe_act, the input of the activation between their projections.",
		{ model: false },
	),
	"min-offloaded-tensor-size": defaulting(
		integer(0),
		2 ** 20,
		"With fine-grained-activation-offloading: tensors of fewer elements stay in device memory.",
		{ model: false },
	),
	"moe-router-fusion": alwaysOn("Fused router kernels."),
	"moe-permute-fusion": alwaysOn("Fused permutation of tokens to experts."),
	"use-fused-weighted-squared-relu": alwaysOn("Activation and routing weight in one kernel."),
	"moe-shared-expert-overlap": off("Shared expert beside the token exchange.", {
		noEffect: "it orders work and changes no value",
	}),
	"moe-token-dispatcher-type": defaulting(
		choice(["alltoall", "allgather", "flex", "auto"]),
		"alltoall",
		"Exchange of tokens with experts of other ranks: alltoall sends a row for each expert; allgather, all rows to all ranks, which is less where ranks are fewer than moe-router-topk; flex, a row to each node, which forwards it to its ranks; auto, what sends the fewest rows.",
		{ model: false, megatron: "allgather" },
	),
	"moe-flex-dispatcher-backend": defaulting(
		choice(["hybridep"], ["deepep"]),
		"hybridep",
		"Backend of moe-token-dispatcher-type flex.",
		{ model: false, megatron: "deepep" },
	),
	"moe-hybridep-ranks-per-nvlink-domain": defaulting(
		integer(1),
		8,
		"With moe-token-dispatcher-type flex: consecutive ranks that are one node. Megatron reads NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN.",
		{ model: false },
	),
	"moe-expert-capacity-bound": optional(
		number(1),
		"Capacity of a rank's experts in rows, relative to an even routing; more rows end the run. Unset: room for all that can come.",
		{ model: false },
	),
} as const;
