/** The layout of ranks (docs/spec/runtime.md §1, §3.6). Every size is 1 unless given: one process is a layout too. */
import { alwaysOn, choice, defaulting, derived, integer, off, optional, records } from "../field.ts";

const size = integer(1);

export const parallelKeys = {
	"llm-only": off("Train without the encoder.", { model: "language model" }),
	"encoder-tp": defaulting(size, 1, "Tensor-parallel size of the encoder.", { megatron: "2" }),
	"encoder-dp": defaulting(size, 1, "Data-parallel size of the encoder.", { megatron: "2" }),
	"encoder-pp": defaulting(size, 1, "Pipeline stages of the encoder, on ranks of its own.", { megatron: "1" }),
	modules: defaulting(
		records,
		[],
		"Encoders beside the vision encoder, each a record of keys of its own (docs/modules.md).",
		{ model: "language model" },
	),
	"llm-offset": derived(
		integer(0),
		"encoder-tp × encoder-dp × encoder-pp and the ranks of modules; 0 without an encoder, and in a training with one rank a module where one GPU is visible",
		"First rank of the language model; 0 puts both modules on the same ranks if they have equally many.",
		{ megatron: "4" },
	),
	"llm-tp": defaulting(size, 1, "Tensor-parallel size of the language model.", {
		megatron: "2",
		aliases: ["tensor-model-parallel-size"],
	}),
	"sequence-parallel": alwaysOn("Between tensor-parallel projections every rank holds a part of the tokens."),
	"llm-cp": defaulting(
		size,
		1,
		"Ranks that hold runs of one microbatch's tokens; attention and scans exchange them for heads.",
		{
			aliases: ["context-parallel-size"],
		},
	),
	"llm-pp": defaulting(size, 1, "Pipeline stages of the language model.", {
		aliases: ["pipeline-model-parallel-size"],
	}),
	"microbatch-group-size-per-virtual-pipeline-stage": optional(
		size,
		"Consecutive microbatches that a stage runs on one of its segments (virtual stages) before the next; unset: llm-pp.",
		{ aliases: ["microbatch-group-size-per-vp-stage"] },
	),
	"delay-wgrad-compute": off(
		"Leave gradients of the language model's projections and experts for the time in which its stages wait; changes no value.",
	),
	"overlap-dispatch-backward-with-experts-wgrad": alwaysOn(
		"Experts' weight gradients are computed while the gradients of their rows travel back; delay-wgrad-compute puts them off further.",
	),
	"overlap-moe-expert-parallel-comm": off(
		"Let a forward and a backward pass of the language model take turns, block by block, so that each hides the other's exchange of experts' rows; changes no value.",
	),
	"ep-overlap-early-attn-memory-release": off(
		"With overlap-moe-expert-parallel-comm: free a backward block's activations before the forward block's experts run; hides less.",
	),
	"llm-dp": derived(
		size,
		"the ranks of torchrun, Slurm or --nproc behind those of other modules, divided by llm-pp and the shards of a weight; else 1",
		"Data-parallel size of the language model.",
		{ megatron: "2" },
	),
	"llm-ep": defaulting(size, 1, "Expert-parallel size of the language model.", {
		aliases: ["expert-model-parallel-size"],
	}),
	"llm-expt-tp": defaulting(size, 1, "Tensor-parallel size of one expert.", {
		megatron: "unset, which is 1",
		aliases: ["expert-tensor-parallel-size"],
	}),
	"tensor-parallel-num-weight-shards": derived(size, "llm-tp", "Shards of a weight: llm-tp × weight shards."),
	"expert-tensor-parallel-num-weight-shards": derived(size, "llm-expt-tp", "Shards of an expert's weight."),
	"encoder-ddp-overlap": off("Overlap the encoder's gradient reduction too."),
	"overlap-grad-reduce": off("Reduce gradients while the backward pass runs, bucket by bucket; changes no value."),
	"overlap-param-gather": off("Gather parameters while the next forward pass runs.", {
		noEffect: "parameters are gathered right after the update, which changes no value",
	}),
	"ddp-num-buckets": optional(size, "Gradient buckets of a module, where reduction overlaps with backward."),
	"ddp-bucket-size": optional(
		integer(0),
		"Least elements of a gradient bucket; unset: the larger of 40 million and a million a replica.",
	),
	"ddp-pad-buckets-for-high-nccl-busbw": off("Pad gradient buckets to a multiple of 65536 elements.", {
		noEffect: "buckets are padded to equal slices of whole cache lines, which changes no value",
	}),
	"distributed-backend": defaulting(
		choice(["nccl", "shm"]),
		"nccl",
		"Communication between GPUs: nccl, with a GPU for each rank; shm, through the host's shared memory, where ranks share GPUs. CPUs use shm.",
	),
	"distributed-timeout-minutes": defaulting(size, 10, "Minutes without progress after which a rank counts as stuck."),
	"max-restarts": defaulting(
		integer(0),
		0,
		"Most restarts of a failed run in its job within restart-window-mins: ranks that live keep their processes; 0: a failure ends the run.",
	),
	spares: defaulting(
		integer(0, 1024),
		0,
		"Processes that are started and idle, to take the place of a lost one in a restart; where an engine starts the ranks of several hosts, whole hosts.",
	),
	"min-lanes": optional(
		size,
		"Least llm-dp with which a run over several hosts goes on, from its newest checkpoint, while hosts are lost and none is spare; unset: it ends.",
	),
	"restart-window-mins": defaulting(size, 60, "Minutes over which max-restarts counts."),
	replication: off(
		"Keep each rank's copy of non-persistent-save-interval on another host too, so that a lost host loses no step.",
	),
	"replication-jump": optional(size, "Ranks from a rank to that which keeps its copy; unset: the ranks of a host."),
	"non-persistent-save-interval": optional(
		size,
		"Steps between copies of the training's state in the host's memory, from which restarts go on; unset: they go on from the newest checkpoint.",
	),
} as const;

/** Keys of the grids: which ranks hold which modules and parts. */
export const gridKeys = [
	...([
		"encoder-tp",
		"encoder-dp",
		"encoder-pp",
		"llm-offset",
		"llm-tp",
		"llm-cp",
		"llm-dp",
		"llm-ep",
		"llm-pp",
		"llm-expt-tp",
	] as const),
	...(["tensor-parallel-num-weight-shards", "expert-tensor-parallel-num-weight-shards"] as const),
] satisfies readonly (keyof typeof parallelKeys)[];
