import { expect, test } from "bun:test";
import { fieldOf, keyOf, keys, spellings } from "../../src/config/schema.ts";
import { documentation, documentationFile } from "./documentation.ts";

test("docs/configuration.md is what the schema says", async () => {
	expect(await Bun.file(documentationFile).text()).toBe(documentation());
});

test("every key has a description that is a sentence", () => {
	for (const key of keys) expect([key, fieldOf(key).description]).toEqual([key, expect.stringMatching(/^\S.*\.$/)]);
});

test("underscores and Megatron's other spellings name the same key", () => {
	expect(keyOf("hidden_size")).toBe("hidden-size");
	expect(keyOf("hybrid_override_pattern")).toBe("hybrid-layer-pattern");
	expect(keyOf("tensor-model-parallel-size")).toBe("llm-tp");
	expect(keyOf("hidden-sise")).toBeUndefined();
});

test("no spelling names two keys", () => {
	expect(new Set(spellings).size).toBe(spellings.length);
	expect(spellings.length).toBe(keys.length + keys.flatMap((key) => fieldOf(key).aliases ?? []).length);
});

test("dropout differs from Megatron's default and says so", () => {
	for (const key of ["hidden-dropout", "attention-dropout"] as const) {
		expect(fieldOf(key).default).toBe(0);
		expect(fieldOf(key).megatron).toBe("0.1");
	}
});

/**
 * Flags of the runtime's table (docs/spec/runtime.md §11) and of the language model (docs/spec/language-model.md §11).
 */
const megatronFlags = `--model-provider --encoder-tp --encoder-dp --llm-offset --llm-tp --llm-cp --llm-pp --llm-dp --llm-ep
--llm-expt-tp --tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --llm-only
--encoder-ddp-overlap --dataset-provider --image-token-id --image-seq-length --mock-dataset-size --class-token-len
--pixel-shuffle --disable-vision-class-token --dynamic-resolution --img-h --img-w --patch-dim --vision-projection-type
--freeze-lm --freeze-vit --freeze-projection --mimo-encoder-prefetch --mimo-encoder-prefetch-depth
--mimo-encoder-prefetch-debug --micro-batch-size --global-batch-size --train-iters --train-samples --seq-length
--max-position-embeddings --vocab-size --make-vocab-size-divisible-by --bf16 --grad-reduce-in-bf16
--no-gradient-accumulation-fusion --calculate-per-token-loss --cross-entropy-loss-fusion --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --ddp-num-buckets --ddp-bucket-size --ddp-pad-buckets-for-high-nccl-busbw
--lr --min-lr --lr-decay-style --lr-warmup-iters --lr-warmup-samples --lr-warmup-fraction --lr-warmup-init
--lr-decay-iters --lr-decay-samples --lr-wsd-decay-style --lr-wsd-decay-iters --lr-wsd-decay-samples --weight-decay
--start-weight-decay --end-weight-decay --weight-decay-incr-style --adam-beta1 --adam-beta2 --adam-eps --clip-grad
--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler --loss-scale --initial-loss-scale
--loss-scale-window --hysteresis --min-loss-scale --seed --data-parallel-random-init --hidden-dropout
--attention-dropout --eval-interval --eval-iters --eval-global-batch-size --eval-micro-batch-size --log-interval
--log-throughput --log-num-zeros-in-grad --log-params-norm --tensorboard-dir --tensorboard-log-interval
--log-timers-to-tensorboard --timing-log-level --timing-log-option --save --load --save-interval
--no-ckpt-fully-parallel-save --exit-interval --exit-duration-in-mins --exit-signal-handler --rerun-mode
--distributed-timeout-minutes --num-layers --hybrid-layer-pattern --hidden-size --num-attention-heads
--group-query-attention --num-query-groups --kv-channels --ffn-hidden-size --squared-relu --disable-bias-linear
--normalization --init-method-std --position-embedding-type --num-experts --moe-router-topk --moe-ffn-hidden-size
--moe-shared-expert-intermediate-size --moe-router-score-function --moe-router-topk-scaling-factor
--moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-dtype --moe-router-load-balancing-type
--moe-aux-loss-coeff --moe-grouped-gemm --moe-router-fusion --moe-permute-fusion --moe-shared-expert-overlap
--use-fused-weighted-squared-relu --moe-token-dispatcher-type --mamba-num-heads --mamba-head-dim --mamba-num-groups
--mamba-state-dim --linear-conv-kernel-dim --attention-backend --ckpt-step --pretrained-checkpoint --finetune
--no-save-optim --no-load-optim --no-save-rng --no-load-rng --override-ckpt-iteration --save-retain-interval
--dist-ckpt-strictness --async-save --sequence-parallel --use-mcore-models --transformer-impl --attention-softmax-in-fp32`;

test("every flag of the specification is known", () => {
	for (const flag of megatronFlags.split(/\s+/)) expect([flag, keyOf(flag.slice(2))]).toEqual([flag, flag.slice(2)]);
});
