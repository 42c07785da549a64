/** Other programs' names (Hugging Face's Trainer and configurations, torchtitan) for keys, for hints about unknown keys. */
import { nearestHint } from "./names.ts";

/** Name elsewhere → key, or flag of a command. */
export const counterparts: Readonly<Record<string, string>> = {
	"vision-layers": "vision-num-layers",
	// Steps and batches.
	"max-steps": "train-iters",
	"num-steps": "train-iters",
	"training-steps": "train-iters",
	steps: "train-iters",
	epochs: "train-epochs",
	"num-epochs": "train-epochs",
	"num-train-epochs": "train-epochs",
	"max-epochs": "train-epochs",
	"batch-size": "micro-batch-size",
	"local-batch-size": "micro-batch-size",
	"per-device-train-batch-size": "micro-batch-size",
	"per-device-eval-batch-size": "eval-micro-batch-size",
	"eval-batch-size": "eval-micro-batch-size",
	"seq-len": "seq-length",
	"max-seq-len": "seq-length",
	"max-seq-length": "seq-length",
	// Optimizer.
	"learning-rate": "lr",
	"min-learning-rate": "min-lr",
	"lr-scheduler-type": "lr-decay-style",
	"warmup-steps": "lr-warmup-iters",
	"warmup-ratio": "lr-warmup-fraction",
	"max-grad-norm": "clip-grad",
	"max-norm": "clip-grad",
	"gradient-clipping": "clip-grad",
	optim: "optimizer",
	beta1: "adam-beta1",
	beta2: "adam-beta2",
	eps: "adam-eps",
	"adam-epsilon": "adam-eps",
	// Checkpoints, data and logs.
	"output-dir": "save",
	"save-dir": "save",
	"checkpoint-dir": "save",
	"save-steps": "save-interval",
	"eval-steps": "eval-interval",
	"logging-steps": "log-interval",
	"resume-from-checkpoint": "load",
	"load-dir": "load",
	"model-name-or-path": "load-hf",
	dataset: "data-path",
	"dataset-path": "data-path",
	"dataloader-num-workers": "num-workers",
	"tokenizer-name": "tokenizer",
	"tensorboard-log-dir": "tensorboard-dir",
	"logging-dir": "tensorboard-dir",
	"wandb-name": "wandb-exp-name",
	// Model.
	"num-hidden-layers": "num-layers",
	"hidden-dim": "hidden-size",
	"intermediate-size": "ffn-hidden-size",
	"num-key-value-heads": "num-query-groups",
	"head-dim": "kv-channels",
	"rms-norm-eps": "norm-epsilon",
	"norm-eps": "norm-epsilon",
	"rope-theta": "rotary-base",
	"num-local-experts": "num-experts",
	"num-experts-per-tok": "moe-router-topk",
	"gradient-checkpointing": "recompute-granularity",
	"activation-checkpointing": "recompute-granularity",
	"recompute-activations": "recompute-granularity",
	"lora-r": "lora-rank",
	"patch-size": "patch-dim",
	"freeze-encoder": "freeze-vit",
	"freeze-vision-tower": "freeze-vit",
	"use-flash-attn": "attention-backend",
	fp8: "fp8-format",
	// Ranks.
	tp: "llm-tp",
	pp: "llm-pp",
	cp: "llm-cp",
	dp: "llm-dp",
	ep: "llm-ep",
	"data-parallel-size": "llm-dp",
	"nproc-per-node": "nproc",
	"num-gpus": "nproc",
};

/** The end of a sentence about an unknown key or flag: its counterpart among `known`, else the nearest name, or "". */
export function keyHint(name: string, known: readonly string[], prefix = ""): string {
	const plain = name.toLowerCase().replaceAll("_", "-");
	const counterpart = Object.hasOwn(counterparts, plain) ? counterparts[plain]! : null;
	if (counterpart !== null && known.includes(counterpart)) return `; here this is ${prefix}${counterpart}`;
	return nearestHint(plain, known, prefix);
}
