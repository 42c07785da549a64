import { expect, test } from "bun:test";
import { camelCase, editDistance, nearestHint, nearestName } from "../../src/config/names.ts";
import { counterparts, keyHint } from "../../src/config/names-elsewhere.ts";
import { spellings } from "../../src/config/schema.ts";

test("edit distance counts insertions, deletions, substitutions and swaps of neighbours", () => {
	for (const [a, b, distance] of [
		["", "abc", 3],
		["abc", "abc", 0],
		["kitten", "sitting", 3],
		["ab", "ba", 1],
		["hiden-size", "hidden-size", 1],
	] as const) {
		expect([a, b, editDistance(a, b)]).toEqual([a, b, distance]);
	}
});

test("the nearest name", () => {
	expect(nearestName("trian", ["parity", "train", "doctor"])).toBe("train");
	expect(nearestHint("jsno", ["json", "help"], "--")).toBe("; the nearest is --json");
});

test("a completely different name has no nearest name", () => {
	expect(nearestName("fp8-format", ["ocr-prompt", "log-format-x"])).toBeNull();
	expect(nearestName("learning-rate", ["rerun-mode", "lr"])).toBeNull();
	expect(nearestHint("learning-rate", ["rerun-mode"])).toBe("");
});

test("a misspelt key is recognised, another one is not", () => {
	for (const [name, hint] of [
		["trian-iters", "; the nearest is train-iters"],
		["train-iter", "; the nearest is train-iters"],
		["seqlength", "; the nearest is seq-length"],
		["Seq_Length", "; the nearest is seq-length"],
		["globalbatchsize", "; the nearest is global-batch-size"],
		["mirco-batch-size", "; the nearest is micro-batch-size"],
		["no-save-optm", "; the nearest is no-save-optim"],
		["lr-decay-stlye", "; the nearest is lr-decay-style"],
		["weigth-decay", "; the nearest is weight-decay"],
		["num-query-group", "; the nearest is num-query-groups"],
		["group-query-atention", "; the nearest is group-query-attention"],
		["tensor-model-paralel-size", "; the nearest is tensor-model-parallel-size"],
		["lr-warmup-steps", "; the nearest is lr-warmup-iters"],
		["bf-16", "; the nearest is bf16"],
		["sed", "; the nearest is seed"],
		["lr-min", "; the nearest is min-lr"],
		["val-interval", "; the nearest is eval-interval"],
		["adam-beta", "; the nearest is adam-beta1"],
		["distributed-optimizer", "; the nearest is use-distributed-optimizer"],
		["exit-signal", "; the nearest is exit-signal-handler"],
		["moe-token-dispatcher", "; the nearest is moe-token-dispatcher-type"],
		["deterministic", "; the nearest is deterministic-mode"],
		["vision-layers", "; here this is vision-num-layers"],
		["mamba-heads", "; the nearest is mamba-num-heads"],
		["num-heads", "; the nearest is num-attention-heads"],
		["learning_rate", "; here this is lr"],
		["gradient-accumulation-steps", ""],
		["data-parallel-size", "; here this is llm-dp"],
		["eval-batch-size", "; here this is eval-micro-batch-size"],
		["tokenizer-name", "; here this is tokenizer"],
		["freeze-encoder", "; here this is freeze-vit"],
		["save-dir", "; here this is save"],
		["tp", "; here this is llm-tp"],
		["lr-decay", ""],
		["ckpt-format", ""],
		["image-size", ""],
		["gradient-predivide-factor", ""],
		["checkpoint", ""],
		["compile", ""],
		["wandb", ""],
		["num-epochs", "; here this is train-epochs"],
		["llm-size", ""],
		["constructor", ""],
		["x".repeat(1_000_000), ""],
	] as const) {
		expect([name.slice(0, 40), keyHint(name, spellings)]).toEqual([name.slice(0, 40), hint]);
	}
});

test("names of other programs are aliases of keys, not keys", () => {
	for (const [name, key] of Object.entries(counterparts)) {
		expect([name, [...spellings, "nproc"].includes(key)]).toEqual([name, true]);
		expect([name, spellings.includes(name)]).toEqual([name, false]);
	}
});

test("camel case keeps digits", () => {
	expect(camelCase("adam-beta1")).toBe("adamBeta1");
	expect(camelCase("img-h")).toBe("imgH");
});
