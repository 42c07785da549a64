/**
 * Flags of Megatron-LM, of its MIMO loop and of the Nemotron VLM branch that are no keys here: each is accepted with a line that
 * says what stands for it, refused with the name of its counterpart, or sets keys. Flags that write other keys' values from several
 * (pipeline cuts, ratios of layers) are in upstream-rewrites.ts.
 */
import type { Key } from "./schema.ts";
import { type Aside, describeOrigin, type Entry, type Origin } from "./sources.ts";

/** Meaning of a flag with these values. */
type Meaning =
	| { readonly kind: "accepted"; readonly note: string }
	| { readonly kind: "refused"; readonly message: string }
	| { readonly kind: "keys"; readonly values: readonly (readonly [Key, unknown])[] }
	| { readonly kind: "rewrite" };

type Reading = (values: readonly string[]) => Meaning;

const accepted =
	(note: string): Reading =>
	() => ({ kind: "accepted", note });

const refused =
	(message: string): Reading =>
	() => ({ kind: "refused", message });

/** Accepts these values alone; `otherwise` ends the sentence about any other. */
const only =
	(allowed: readonly string[], note: string, otherwise: string): Reading =>
	(values) =>
		values.length > 0 && values.every((value) => allowed.includes(value))
			? { kind: "accepted", note }
			: { kind: "refused", message: `allowed is ${allowed.join(" or ")}: ${otherwise}` };

const keys =
	(...values: readonly (readonly [Key, unknown])[]): Reading =>
	() => ({ kind: "keys", values });

const rewrite: Reading = () => ({ kind: "rewrite" });

const each = (names: readonly string[], reading: Reading) => Object.fromEntries(names.map((name) => [name, reading]));

const fusion = "native kernels decide what is fused, which changes no value";
const unread = "Megatron reads it nowhere";
const shardedOptimizer = "there is no FSDP; use-distributed-optimizer shards the optimizer";
const trace = "profile-step-start writes a trace of all ranks to profile-file";
const distilled = "export-kd-alpha and export-kd-temperature weigh the distillation from export-kd-teacher-load";
const graphs = "cuda-graph-impl local decides by itself what becomes a graph";
const alwaysLogged = "tensorboard-dir always has it";

const freezing: Readonly<Record<string, readonly [tower: boolean, language: boolean]>> = {
	stage1: [true, true],
	stage2: [true, false],
	stage3: [false, false],
};

const trainingStage: Reading = ([stage = ""]) => {
	const frozen = freezing[stage];
	if (frozen === undefined)
		return {
			kind: "refused",
			message: "allowed is stage1 (the projector alone trains), stage2 (the tower does not) or stage3",
		};
	const [tower, language] = frozen;
	return {
		kind: "keys",
		values: [
			["freeze-vit", tower],
			["freeze-lm", language],
			["freeze-projection", false],
		],
	};
};

const flags: Readonly<Record<string, Reading>> = {
	// The model.
	"is-hybrid-model": accepted("hybrid-layer-pattern describes every model"),
	spec: accepted("hybrid-layer-pattern says the layers, and every kind has one implementation"),
	"enable-experimental": accepted("no feature needs leave"),
	...each(
		["export-default-te-spec", "export-te-mcore-model", "export-model-type"],
		accepted("every layer kind has one implementation"),
	),
	...each(
		[
			...["no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion", "no-masked-softmax-fusion"],
			...["no-rope-fusion", "no-persist-layer-norm", "cross-entropy-fusion-impl", "bias-gelu-fusion"],
		],
		accepted(fusion),
	),
	"apply-query-key-layer-scaling": accepted("attention's softmax is always fp32"),
	...each(
		[
			...["hybrid-attention-ratio", "hybrid-mlp-ratio", "moe-layer-freq", "mtp-hybrid-override-pattern"],
			"linear-attention-freq",
			...["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"],
			...["num-layers-in-first-pipeline-stage", "num-layers-in-last-pipeline-stage"],
			...["num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"],
			...["pipeline-model-parallel-layout", "num-microbatches", "llm-expt-dp", "image-token"],
		],
		rewrite,
	),
	...each(
		["account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"],
		refused("here | in hybrid-layer-pattern says where stages begin"),
	),
	"experimental-attention-variant": only(
		["gdn", "gated_delta_net"],
		"G in hybrid-layer-pattern is a layer of Gated DeltaNet",
		"other variants are not built",
	),
	// Experts.
	"use-transformer-engine-op-fuser": keys(["moe-fused-mlp", "auto"]),
	"moe-per-layer-logging": accepted(alwaysLogged),
	"moe-router-padding-for-quantization": accepted("experts take rows of any number, and none is padded"),
	"moe-pad-experts-for-cuda-graph-inference": accepted("experts take rows of any number, and none is padded"),
	// Elastic models.
	...each(
		["binary-mask", "slice"],
		accepted("Megatron's masks do not depend on it; here too a choice masks the parent's units"),
	),
	...each(
		[
			...[
				"flex-strict",
				"no-attn-skip",
				"force-mlp",
				"force-mamba",
				"force-emb",
				"force-router-skip",
				"disable-budget",
			],
			...["skip-num-attn-layer-constraint", "skip-total-layer-constraint", "log-budgets", "basemodel-type"],
			...["flextron-config-file"],
		],
		accepted(unread),
	),
	...each(["distillation", "distill-coeff", "distill-only"], accepted(`${unread}; ${distilled}`)),
	"curr-iteration": accepted("the run's own step counts"),
	// The branch's model and its parts.
	"training-stage": trainingStage,
	"correct-encoder-grad-for-partial-participation": keys(["encoder-grad-participation", "corrected"]),
	"no-correct-encoder-grad-for-partial-participation": keys(["encoder-grad-participation", "exact"]),
	"vision-model-type": only(["radio"], "the encoder is RADIO", "the encoder is RADIO"),
	fp32: keys(["bf16", false]),
	fp16: refused("there is no fp16 training; here this is bf16"),
	"tokenizer-prompt-format": only(
		["nemotron6-moe"],
		"that format is the chat template of the tokenizer's folder",
		"another format is given with chat-template",
	),
	...each(
		["force-system-message", "sft", "sft-tokenizer-prompt-format"],
		refused("here conversation-template and chat-template say what a turn is"),
	),
	...each(
		["encoder-cp", "encoder-ep", "encoder-expt-tp", "encoder-expt-dp"],
		only(
			["1"],
			"the encoder has tensor, data and pipeline parallelism",
			"the encoder has encoder-tp, encoder-dp and encoder-pp",
		),
	),
	"encoder-offset": only(
		["0"],
		"the encoder starts at rank 0",
		"the encoder starts at rank 0; llm-offset places the language model",
	),
	...each(
		[
			"timeline-profile",
			"timeline-dir",
			"timeline-ranks",
			"timeline-dp-replica",
			"timeline-cuda-events",
			"timeline-nvtx",
		],
		accepted(trace),
	),
	...each(
		[
			"profile",
			"profile-ranks",
			"use-pytorch-profiler",
			"nvtx-ranges",
			"record-memory-history",
			"memory-snapshot-path",
		],
		accepted(trace),
	),
	// Data.
	"mock-data": keys(["dataset-provider", "mock"]),
	...each(["dataloader-save", "dataloader-load"], accepted("every checkpoint has the positions in the data")),
	"validate-energon-data-alignment": accepted("encoder and language ranks always get the same samples"),
	"energon-sample-trace-dir": refused("here mimo data preview shows the samples of a run in order"),
	// Sharding and processes.
	...each(
		[
			...["use-megatron-fsdp", "use-torch-fsdp2", "data-parallel-sharding-strategy", "outer-dp-sharding-strategy"],
			...["megatron-fsdp-main-params-dtype", "megatron-fsdp-main-grads-dtype", "megatron-fsdp-grad-comm-dtype"],
			...["use-custom-fsdp", "torch-fsdp2-no-reshard-after-forward"],
		],
		refused(shardedOptimizer),
	),
	"init-model-with-meta-device": accepted("every rank makes its own part of the initial weights alone, in any layout"),
	"num-distributed-optimizer-instances": only(
		["1"],
		"use-distributed-optimizer shards over all replicas",
		"use-distributed-optimizer shards over all replicas",
	),
	"no-use-layer-wise-param-layout": accepted("use-distributed-optimizer shards the optimizer by equal slices"),
	"use-tp-pp-dp-mapping": refused("ranks count tp, dp, pp; --print-topology shows them"),
	...each(
		["high-priority-stream-groups", "disable-gloo-process-groups", "use-sharp", "nccl-communicator-config-path"],
		accepted("groups and their streams are this program's own"),
	),
	...each(
		["tp-comm-overlap", "no-overlap-p2p-communication", "overlap-p2p-comm", "defer-embedding-wgrad-compute"],
		accepted("the schedule decides what runs at the same time, which changes no value"),
	),
	...each(
		["te-rng-tracker", "inference-rng-tracker"],
		accepted("random numbers follow the seed and their place alone"),
	),
	...each(
		["manual-gc", "manual-gc-interval", "manual-gc-eval", "empty-unused-memory-level"],
		accepted("device memory is released at once, without a collector"),
	),
	...each(["cuda-graph-scope", "cuda-graph-modules", "cuda-graph-warmup-steps"], accepted(graphs)),
	// The optimizer and precision.
	"accumulate-allreduce-grads-in-fp32": accepted("gradients are always added up in fp32"),
	...each(
		["fp8-param-gather", "fp4-format", "fp4-recipe", "fp4-param-gather"],
		refused(
			"weights are gathered in the model's type; here fp8-format e4m3 runs experts in FP8, and projections with fp8-modules",
		),
	),
	...each(
		["first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"],
		accepted("experts alone run in FP8"),
	),
	"muon-use-syrk": accepted("it only chooses a kernel"),
	...each(
		["qk-clip", "qk-clip-alpha", "qk-clip-threshold", "log-max-attention-logit"],
		refused("attention's kernels keep the sums of softmax and no largest logit"),
	),
	// Logs.
	...each(
		[
			...["log-validation-ppl-to-tensorboard", "log-memory-to-tensorboard", "log-learning-rate-to-tensorboard"],
			...["log-loss-scale-to-tensorboard", "log-batch-size-to-tensorboard", "log-world-size-to-tensorboard"],
		],
		accepted(alwaysLogged),
	),
	"tensorboard-queue-size": accepted("points are written with every log line"),
	...each(
		["logging-level", "log-progress", "log-straggler", "straggler-minmax-count", "log-energy"],
		accepted("timing-log-level and log-json say what is logged"),
	),
	// Checkpoints.
	"ckpt-format": only(
		["torch_dist"],
		"checkpoints are native, and mimo convert-ckpt --to torch_dist makes Megatron's",
		"mimo convert-ckpt --to torch_dist makes Megatron's",
	),
	"auto-detect-ckpt-format": accepted("load knows every format"),
	...each(["ckpt-fully-parallel-save", "ckpt-fully-parallel-load"], accepted("every rank writes and reads its share")),
	...each(
		[
			...["use-persistent-ckpt-worker", "async-strategy", "async-ckpt-use-cpu-shm", "ckpt-assume-constant-structure"],
			"no-load-strategy",
		],
		accepted("async-save writes while training goes on"),
	),
	"verify-integrity": accepted("every checkpoint has digests, which loading compares"),
	"use-checkpoint-args": accepted("load without config and preset takes the checkpoint's configuration"),
	"no-use-tokenizer-model-from-checkpoint-args": accepted("tokenizer names the tokenizer"),
};

/** Beginnings of the names of other programs' flags. */
const families: readonly (readonly [start: RegExp, reading: Reading])[] = [
	[/^(rl|grpo|langrl)-|^perform-rl-step$/, refused("there is no reinforcement learning")],
	[/^inference-/, refused("here mimo generate answers prompts")],
];

/** Flags that mean the same, in words, for the documentation. */
export function upstreamFlagTexts(): ReadonlyMap<string, readonly string[]> {
	const text = (name: string) => {
		const meaning = flags[name]!([]);
		switch (meaning.kind) {
			case "accepted":
				return meaning.note;
			case "refused":
				return meaning.message.startsWith("allowed") ? meaning.message : `refused: ${meaning.message}`;
			case "keys":
				return `sets ${meaning.values.map(([key, value]) => `${key} ${value}`).join(", ")}`;
			case "rewrite":
				return rewriteTexts.find(([names]) => names.test(name))![1];
		}
	};
	return Map.groupBy(Object.keys(flags), text);
}

/** Effects of the flags of upstream-rewrites.ts, by their names. */
const rewriteTexts: readonly (readonly [names: RegExp, text: string])[] = [
	[/ratio|moe-layer|linear-attention|override/, "with num-layers it makes hybrid-layer-pattern"],
	[/stage|pipeline/, "writes | into hybrid-layer-pattern"],
	[/microbatches/, "with micro-batch-size and llm-dp it makes global-batch-size"],
	[/expt-dp/, "has to be what follows from the other sizes"],
	[/image/, "sets image-token-id by the tokenizer"],
];

/** Collects what flags mean. */
export interface Collector {
	readonly entries: Entry[];
	readonly asides: Aside[];
	readonly notes: string[];
	readonly refuse: (where: string, message: string) => void;
}

/** Takes a flag of the tables above, with underscores read as dashes; false: the tables do not list the flag. */
export function takeUpstream(name: string, values: readonly string[], origin: Origin, into: Collector): boolean {
	const plain = name.replaceAll("_", "-");
	const own = Object.hasOwn(flags, plain) ? flags[plain]! : families.find(([start]) => start.test(plain))?.[1];
	const meaning = own?.(values);
	const subject = origin.source === "flag" ? "" : `${plain}: `;
	const where = origin.source === "flag" ? origin.name : describeOrigin(origin);
	switch (meaning?.kind) {
		case undefined:
			return false;
		case "accepted":
			into.notes.push(`${where}: ${subject}${meaning.note}.`);
			return true;
		case "refused":
			into.refuse(where, `${subject}${meaning.message}`);
			return true;
		case "keys":
			into.entries.push(...meaning.values.map(([key, value]) => ({ key, value, origin })));
			return true;
		case "rewrite":
			into.asides.push({ name: plain, values, origin });
			return true;
	}
}

/** Upstream's values of keys: a key's value → the entries that it stands for. */
const values: Readonly<Partial<Record<Key, Readonly<Record<string, readonly (readonly [Key, unknown])[]>>>>> = {
	"dataset-provider": { energon_multimodal: [["dataset-provider", "energon"]] },
	optimizer: {
		dist_muon: [
			["optimizer", "muon"],
			["use-distributed-optimizer", true],
		],
	},
	"model-provider": {
		"nemotron-moe-vlm-20l": [["preset", "nemotron-moe-vlm-20l"]],
		"nemotron-moe-vlm-54l": [["preset", "nemotron-moe-vlm-54l"]],
	},
};

/** The keys and values that a given one stands for: itself, unless it is upstream's name of others. */
export function upstreamValues(key: Key, value: unknown): readonly (readonly [Key, unknown])[] {
	const known = values[key];
	return typeof value === "string" && known && Object.hasOwn(known, value) ? known[value]! : [[key, value]];
}
