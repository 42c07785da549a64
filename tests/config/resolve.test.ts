import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { dataLanes, paddedVocabularySize } from "../../src/config/derive.ts";
import { configurationJson, configurationTable } from "../../src/config/print.ts";
import { configurationOf, resolveConfiguration } from "../../src/config/resolve.ts";
import { schedulesOf } from "../../src/optim/schedules.ts";
import { UserError } from "../../src/system/errors.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-config-"));
afterAll(() => rmSync(folder, { recursive: true }));

function file(text: string): string {
	const name = join(folder, "run.yaml");
	writeFileSync(name, text);
	return name;
}

/** The sentences of a refused configuration, one a mistake. */
function mistakes(...args: string[]): string[] {
	try {
		resolveConfiguration(args);
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		expect(error.exitCode).toBe(2);
		const lines = error.message.split("\n");
		return lines.length === 1 ? lines : lines.slice(1).map((line) => line.trim());
	}
	throw new Error("The configuration was accepted.");
}

const tiny = ["--preset", "nemotron-tiny"];

test("a value that ends like one of a command's own flags is a value", () => {
	const { configuration } = resolveConfiguration([...tiny, "--log-json", "t.json"], { json: false });
	expect(configuration.logJson).toBe("t.json");
});

test("a preset is overruled by the file, the file by flags, wherever the preset is named", () => {
	const name = file("lr: 0.5\nhidden_size: 64\npreset: nemotron-tiny\n");
	const { configuration, origins } = resolveConfiguration(["--lr", "1", "--config", name]);
	expect(configuration.lr).toBe(1);
	expect(configuration.hiddenSize).toBe(64);
	expect(configuration.vocabSize).toBe(256);
	expect(origins.lr).toEqual({ source: "flag", name: "--lr" });
	expect(origins["hidden-size"]).toEqual({ source: "file", file: name, line: 2 });
	expect(origins["vocab-size"]).toEqual({ source: "preset", name: "nemotron-tiny" });
	expect(origins["adam-beta1"]).toEqual({ source: "default" });
	expect(origins["max-position-embeddings"]).toEqual({ source: "derived", from: "seq-length" });
});

test("windows are said as Megatron says them, and others are refused", () => {
	const pattern = [...tiny, "--hybrid-layer-pattern", "*-*-"];
	for (const said of [["(19, 0)"], ["(19,0)"], ["19,0"], ["19", "0"]]) {
		const { configuration } = resolveConfiguration([...pattern, "--window-size", ...said]);
		expect(configuration.windowSize).toEqual([19, 0]);
	}
	const listed = resolveConfiguration([...pattern, "--window-size=19,0", "--window-attn-skip-freq", "[1,0,0,0]"]);
	expect(listed.configuration.windowAttnSkipFreq).toEqual([1, 0, 0, 0]);
	for (const args of [["19"], ["19,1"], ["19,0,0"], ["-1,0"]]) {
		expect(mistakes(...pattern, `--window-size=${args}`)).toEqual([expect.stringContaining("window-size")]);
	}
	for (const args of ["0", "1,0", "2,0,0,0"]) {
		const given = ["--window-size=19,0", `--window-attn-skip-freq=${args}`];
		expect(mistakes(...pattern, ...given)).toEqual([expect.stringContaining("window-attn-skip-freq")]);
	}
	expect(mistakes(...pattern, "--window-attn-skip-freq=2")[0]).toContain("allowed with window-size");
});

test("paths in a file are relative to it, paths of flags are left alone", () => {
	const { configuration } = resolveConfiguration([
		"--config",
		file("preset: nemotron-tiny\ndata-path: text/book.txt\nlog-json: /elsewhere/log.json\n"),
		"--save-hf",
		"out",
	]);
	expect(configuration.dataPath).toBe(join(folder, "text/book.txt"));
	expect(configuration.logJson).toBe("/elsewhere/log.json");
	expect(configuration.saveHf).toBe("out");
	expect(configuration.datasetProvider).toBe("text");
});

test("flags: equals signs, underscores, switches, negation, lists, the last of two", () => {
	const { configuration } = resolveConfiguration([
		...tiny,
		"--lr=2e-3",
		"--seq_length=64",
		"--bf16",
		"--no-squared-relu",
		"--swiglu=true",
		"--log-throughput",
		"false",
		"--moe-router-load-balancing-type",
		"seq_aux_loss",
		"global_aux_loss",
		"--moe-aux-loss-coeff",
		"1e-4",
		"1e-3",
		"--seed",
		"1",
		"--seed",
		"2",
	]);
	expect(configuration).toMatchObject({ lr: 2e-3, seqLength: 64, bf16: true, squaredRelu: false, swiglu: true });
	expect(configuration).toMatchObject({ logThroughput: false, seed: 2, moeAuxLossCoeff: [1e-4, 1e-3] });
	expect(configuration.moeRouterLoadBalancingType).toEqual(["seq_aux_loss", "global_aux_loss"]);
});

test("items of a list are arguments of their own or lie between commas", () => {
	const losses = (...args: string[]) =>
		resolveConfiguration([...tiny, "--moe-aux-loss-coeff", "1e-4,1e-3", ...args]).configuration;
	const two = ["seq_aux_loss", "global_aux_loss"];
	for (const args of [two, [two.join(",")]]) {
		const { moeRouterLoadBalancingType, moeAuxLossCoeff } = losses("--moe-router-load-balancing-type", ...args);
		expect([moeRouterLoadBalancingType, moeAuxLossCoeff]).toEqual([two, [1e-4, 1e-3]] as never);
	}
	expect(losses(`--moe-router-load-balancing-type=${two}`).moeRouterLoadBalancingType).toEqual(two as never);
});

test("a pattern that starts with dashes is a value, a flag is not", () => {
	expect(resolveConfiguration([...tiny, "--hybrid-layer-pattern", "--M"]).configuration.numLayers).toBe(3);
	expect(mistakes(...tiny, "--lr", "--bf16")).toEqual(["--lr: a value has to follow: a number of at least 0."]);
});

test("every mistake is reported at once, each with its place, value and what is allowed", () => {
	const name = file('preset: nemotron-tiny\nhidden-size: 12.5\nlr: "abc"\nclip-grad: -1\nbf16: maybe\n');
	const lines = mistakes(
		"--config",
		name,
		"--micro-batch-size",
		"x",
		"--hybrid-layer-pattern",
		"MEDM",
		"--seqlength",
		"3",
	);
	expect(lines.sort()).toEqual(
		[
			`${name}:2: hidden-size is 12.5; allowed is an integer of at least 1.`,
			`${name}:3: lr is "abc"; allowed is a number of at least 0.`,
			`${name}:4: clip-grad is -1; allowed is a number of at least 0.`,
			`${name}:5: bf16 is "maybe"; allowed is true or false.`,
			'--micro-batch-size: the value is "x"; allowed is an integer of at least 1.',
			'--hybrid-layer-pattern: the value is "MEDM"; position 3: DeepSeek sparse attention layers (D) are not built yet; allowed are M, G, *, +, - and E.',
			"--seqlength: there is no such flag; the nearest is --seq-length.",
		].sort(),
	);
});

test("with a mistake, what a checkpoint would have told is not called missing", () => {
	const checkpoint = { trains: false, beneath: () => [] };
	for (const [flags, sentence] of [
		[["--load", "x", "--llm-pt", "2"], "--llm-pt: there is no such flag; the nearest is --llm-tp."],
		[["--load", "x", "--threads"], "--threads: a value has to follow: an integer from 0 to 1024."],
	] as const) {
		expect(() => resolveConfiguration(flags, {}, checkpoint)).toThrow(new UserError(sentence));
	}
});

test("files: duplicate keys, unknown keys, nested keys, aliases, syntax, absence", () => {
	const inFile = (text: string) =>
		mistakes("--config", file(`preset: nemotron-tiny\n${text}`)).map((line) => line.slice(folder.length));
	expect(inFile("lr: 1\nlr: 2\n")).toEqual(["/run.yaml:3: lr is given a second time."]);
	expect(inFile("clip-grad: 1\nclip_grad: 2\n")).toEqual([
		"/run.yaml:3: clip_grad is given a second time; clip-grad is on line 2.",
	]);
	expect(inFile("hiden-size: 2\n")).toEqual(["/run.yaml:2: there is no key hiden-size; the nearest is hidden-size."]);
	expect(inFile("lr:\n  max: 3\n")).toEqual([
		"/run.yaml:2: lr has keys below it; the file is flat, one `key: value` a line.",
	]);
	expect(inFile("hybrid-layer-pattern: *M\n")[0]).toContain(
		"is an alias in YAML; put a pattern in quotes, or write the value",
	);
	expect(inFile("lr: [1\n")[0]).toMatch(/^\/run\.yaml:\d+: this is not YAML: /);
	expect(inFile("---\nlr: 1\n")).toEqual(["/run.yaml:2: `---` begins a second document; a configuration is one."]);
	expect(inFile("load: ~/runs\n")).toEqual([
		"/run.yaml:2: load begins with ~, which only a shell replaces; write the folder's name.",
	]);
	expect(inFile("lr: .inf\nmin-lr: .nan\n")).toEqual([
		"/run.yaml:2: lr is Infinity; allowed is a number of at least 0.",
		"/run.yaml:3: min-lr is NaN; allowed is a number of at least 0.",
	]);
	expect(inFile("vocab-size:\n")).toEqual(["/run.yaml:2: vocab-size is null; allowed is an integer of at least 1."]);
	expect(mistakes("--config", join(folder, "none.yaml"))).toEqual([
		`--config ${join(folder, "none.yaml")}: there is no such file.`,
	]);
	expect(mistakes("--config", file("- a\n"))[0]).toContain("the file must be a list of `key: value` lines");
});

test("missing keys are all named", () => {
	const lines = mistakes();
	for (const key of ["hybrid-layer-pattern", "hidden-size", "vocab-size"]) {
		expect(lines.filter((line) => line.startsWith(`${key}: it is missing`))).toHaveLength(1);
	}
	expect(lines.some((line) => line.startsWith("train-iters"))).toBe(true);
	const model = [
		"--hidden-size",
		"8",
		"--vocab-size",
		"9",
		"--seq-length",
		"4",
		"--lr",
		"1",
		"--micro-batch-size",
		"1",
	];
	expect(
		mistakes(...model, "--train-iters", "1", "--hybrid-layer-pattern", "*E").map((line) => line.split(" (")[0]),
	).toEqual(["num-attention-heads: it is missing", "num-experts: it is missing"]);
	expect(
		resolveConfiguration([...model, "--train-iters", "1", "--hybrid-layer-pattern", "-"]).configuration,
	).toMatchObject({
		numExperts: 0,
		numLayers: 1,
		ffnHiddenSize: 32,
	});
});

test("constraints between keys are checked", () => {
	const blamed = (...args: string[]) => mistakes(...tiny, ...args).map((line) => line.split(":")[0]);
	expect(blamed("--moe-router-topk", "9")).toEqual(["--moe-router-topk"]);
	const softmax = ["--moe-router-score-function", "softmax", "--no-moe-router-enable-expert-bias"];
	expect(blamed("--moe-router-topk", "1", ...softmax)).toEqual(["--moe-router-topk"]);
	const learns = ["--moe-router-topk", "1", ...softmax, "--moe-router-pre-softmax"];
	expect(resolveConfiguration([...tiny, ...learns]).configuration.moeRouterTopk).toBe(1);
	expect(blamed("--num-query-groups", "3")).toEqual(["num-attention-heads (preset nemotron-tiny)"]);
	expect(blamed("--min-lr", "1")).toEqual(["--min-lr"]);
	expect(blamed("--train-iters", "300", "--train-samples", "100")).toEqual(["--train-samples"]);
	expect(blamed("--train-iters", "300", "--train-epochs", "2")).toEqual(["--train-epochs"]);
	expect(blamed("--train-samples", "300", "--train-epochs", "2")).toEqual(["--train-epochs"]);
	expect(blamed("--lr-decay-samples", "100")).toEqual(["--lr-decay-samples"]);
	expect(blamed("--lr-decay-style", "WSD")).toEqual(["--lr-decay-style"]);
	expect(blamed("--lr-warmup-iters", "300")).toEqual(["--lr-warmup-iters"]);
	expect(blamed("--global-batch-size", "7")).toEqual(["--global-batch-size"]);
	expect(blamed("--max-position-embeddings", "8")).toEqual(["--max-position-embeddings"]);
	expect(blamed("--moe-router-score-function", "softmax")).toEqual([
		"moe-router-enable-expert-bias (preset nemotron-tiny)",
	]);
	expect(blamed("--swiglu")).toEqual(["--swiglu"]);
	expect(blamed("--start-weight-decay", "0.1")).toEqual(["--start-weight-decay"]);
	expect(blamed("--weight-decay-incr-style", "linear")).toEqual(["--weight-decay-incr-style"]);
	expect(blamed("--moe-aux-loss-coeff", "1", "2")).toEqual(["--moe-aux-loss-coeff"]);
	expect(blamed("--overlap-param-gather")).toEqual(["--overlap-param-gather"]);
	expect(blamed("--llm-cp", "3")).toEqual(["--llm-cp"]);
	expect(blamed("--profile-step-end", "2")).toEqual(["--profile-step-end"]);
	expect(blamed("--profile-step-start", "3", "--profile-step-end", "2")).toEqual(["--profile-step-end"]);
	expect(blamed("--split", "0,0,0")).toEqual(["--split"]);
	expect(blamed("--threads", "100000")).toEqual(["--threads"]);
	expect(mistakes(...tiny, "--ckpt-step", "5")).toEqual(["--ckpt-step: the value is 5; it needs load."]);
	expect(mistakes(...tiny, "--llm-dp", "65537", "--global-batch-size", "262148")).toEqual([
		"--llm-dp: the value is 65537; with it the run has 65537 ranks, and at most 65536 are allowed.",
	]);
	expect(mistakes(...tiny, "--train-iters", "99999999999999999999")).toEqual([
		"--train-iters: the value is 100000000000000000000; allowed is an integer of at least 1 and at most 9007199254740991.",
	]);
});

test("a value of Megatron that is not supported is refused by name", () => {
	expect(mistakes(...tiny, "--position-embedding-type", "relative")[0]).toContain("relative is not built yet");
});

test("flags that change nothing are accepted and said in one line each", () => {
	const { notes } = resolveConfiguration([
		...tiny,
		"--moe-grouped-gemm",
		"--moe-router-fusion",
		"--hysteresis",
		"2",
		"--num-layers",
		"3",
		"--hybrid-layer-pattern",
		"ME*-MEM",
	]);
	expect(notes).toEqual([
		"Always so here: moe-grouped-gemm, moe-router-fusion.",
		"Without effect here: hysteresis (there is no fp16 training and so no loss scaling).",
		"num-layers is 3, but hybrid-layer-pattern has 7 layers, which counts.",
	]);
	expect(mistakes(...tiny, "--no-moe-grouped-gemm")[0]).toContain("it is always so here");
});

test("num-layers is the pattern's", () => {
	expect(
		resolveConfiguration([...tiny, "--num-layers", "9", "--hybrid-layer-pattern", "MM"]).configuration.numLayers,
	).toBe(2);
});

test("the upstream 20-layer arguments are accepted", () => {
	const { configuration } = resolveConfiguration(
		`--model-provider nemotron-moe-vlm --dataset-provider mock --image-token-id 511 --dynamic-resolution --pixel-shuffle
--disable-vision-class-token --num-layers 20 --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM* --hidden-size 2688
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 1856 --kv-channels 128
--squared-relu --disable-bias-linear --normalization RMSNorm --init-method-std 0.0173 --num-experts 128
--moe-router-topk 6 --moe-grouped-gemm --moe-ffn-hidden-size 1856 --moe-router-score-function sigmoid
--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-router-fusion --moe-aux-loss-coeff 1e-4
--moe-shared-expert-intermediate-size 3712 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall
--moe-permute-fusion --use-fused-weighted-squared-relu --mamba-num-heads 64 --mamba-head-dim 64 --mamba-num-groups 8
--mamba-state-dim 128 --linear-conv-kernel-dim 4 --position-embedding-type none --attention-backend flash
--calculate-per-token-loss --cross-entropy-loss-fusion --seq-length 8192 --max-position-embeddings 8192 --bf16
--encoder-tp 2 --encoder-dp 2 --llm-offset 4 --llm-tp 2 --llm-cp 1 --llm-pp 1 --llm-dp 1 --llm-ep 2 --llm-expt-tp 1
--tensor-parallel-num-weight-shards 4 --expert-tensor-parallel-num-weight-shards 2 --vocab-size 131072
--micro-batch-size 1 --global-batch-size 8 --lr 2e-4 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 0
--lr-decay-iters 10 --weight-decay 0.05 --override-opt-param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
--clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --encoder-ddp-overlap
--train-iters 20 --eval-interval 1 --eval-iters 0 --log-interval 1 --rerun-mode disabled`.split(/\s+/),
	);
	expect(dataLanes(configuration)).toBe(2);
	expect(configuration).toMatchObject({ llmTp: 2, hiddenSize: 2688, attentionBackend: "flash", adamBeta2: 0.95 });
});

test("presets resolve, and differ where the models differ", () => {
	const of = (preset: string) => configurationOf({ preset, "train-iters": 1000 });
	const [twenty, nano, large] = ["nemotron-20l", "nemotron-nano-30b-a3b", "nemotron-54l"].map(of);
	expect([twenty, nano, large].map((c) => c!.numLayers)).toEqual([20, 52, 54]);
	expect([twenty, nano, large].map((c) => c!.numQueryGroups)).toEqual([8, 2, 8]);
	expect([twenty, nano].map((c) => c!.lr)).toEqual([2e-4, 1.6e-3]);
	expect(of("nemotron-tiny").vocabSize).toBe(256);
});

test("the vocabulary is padded to a multiple of make-vocab-size-divisible-by, on every layout", () => {
	expect(paddedVocabularySize(configurationOf({ preset: "nemotron-tiny" }))).toBe(256);
	expect(paddedVocabularySize(configurationOf({ preset: "nemotron-tiny", "vocab-size": 257 }))).toBe(384);
	const cut = configurationOf({ preset: "nemotron-tiny", "vocab-size": 257, "llm-tp": 2 });
	expect(paddedVocabularySize(cut)).toBe(384);
});

test("--print-config shows key, value and origin", () => {
	const resolved = resolveConfiguration([...tiny, "--lr", "1e-3"]);
	const lines = configurationTable(resolved).split("\n");
	expect(lines.find((line) => line.startsWith("lr "))).toMatch(/^lr +0\.001 +flag --lr$/);
	expect(lines.find((line) => line.startsWith("data-path "))).toMatch(/^data-path +- +default$/);
	const json = JSON.parse(configurationJson(resolved));
	expect(json.configuration["hybrid-layer-pattern"]).toBe(resolved.configuration.hybridLayerPattern);
	expect(json.origins["vocab-size"]).toBe("preset nemotron-tiny");
});

test("a preset's schedule follows the length of the training, unless another one is given", () => {
	const warmup = (...flags: string[]) => schedulesOf(resolveConfiguration(flags).configuration).learningRate;
	expect(warmup(...tiny).warmupSamples).toBe(160);
	expect(warmup(...tiny, "--train-iters", "3").warmupSamples).toBeCloseTo(1.6, 12);
	expect(warmup("--preset", "nemotron-vlm-tiny").warmupSamples).toBe(160);
	for (const flags of [
		["--lr-warmup-iters", "5"],
		["--train-samples", "800", "--lr-warmup-samples", "40"],
		["--lr-warmup-fraction", "0.1", "--lr-decay-iters", "50"],
	]) {
		expect(warmup(...tiny, ...flags).warmupSamples).toBe(40);
	}
	expect(warmup(...tiny, "--lr-warmup-iters", "0").warmupSamples).toBe(0);
	// The published recipe decays over 10 steps, which are not samples.
	const samples = ["--preset", "nemotron-20l", "--train-samples", "800"];
	expect(mistakes(...samples)).toEqual([
		"lr-decay-iters (preset nemotron-20l): the value is 10; allowed only with train-iters.",
	]);
	expect(warmup(...samples, "--lr-decay-samples", "80").decaySamples).toBe(80);
	const given = file("preset: nemotron-tiny\nlr-warmup-iters: 5\n");
	expect(mistakes("--config", given, "--lr-warmup-fraction", "0.1")).toEqual([
		"--lr-warmup-fraction: the value is 0.1; allowed only without lr-warmup-iters and lr-warmup-samples.",
	]);
});

test("train-epochs gives the steps that the data's length makes of it", () => {
	const resolve = (...args: string[]) =>
		resolveConfiguration(
			[...tiny, "--global-batch-size", "4", "--lr-warmup-iters", "0", ...args],
			{},
			{ epoch: () => 30 },
		);
	const steps = (epochs: string) => resolve("--train-epochs", epochs).configuration.trainIters;
	// The last step of a pass takes samples of the next.
	expect(["0.1", "0.2", "1", "2", "3"].map(steps)).toEqual([1, 2, 8, 15, 23]);
	const { configuration, origins, notes } = resolve("--train-epochs", "2", "--lr-warmup-iters", "14");
	expect(notes).toEqual(["train-epochs 2 of 30 sequences: 15 steps of global-batch-size 4."]);
	expect(origins["train-iters"]).toMatchObject({ source: "derived" });
	expect(schedulesOf(configuration)).toMatchObject({
		trainIterations: 15,
		learningRate: { warmupSamples: 56, decaySamples: 60 },
	});
	expect(() => resolve("--train-epochs", "2", "--lr-warmup-iters", "15")).toThrow(
		"--lr-warmup-iters: the value is 15; allowed is less than train-iters, which is 15.",
	);
	expect(() => resolve("--train-epochs", "1e300")).toThrow("more steps than can be counted");
});

test("the data of train-epochs are not opened for a configuration with a mistake, or by a command that does not train", () => {
	const epoch = () => {
		throw new UserError("The data are opened.");
	};
	const epochs = [...tiny, "--train-epochs", "2"];
	expect(() => resolveConfiguration([...epochs, "--lr", "-1"], {}, { epoch })).toThrow("--lr");
	expect(resolveConfiguration(epochs, {}, { epoch, trains: false }).configuration.trainIters).toBeNull();
	expect(() => resolveConfiguration(epochs, {}, { epoch })).toThrow("The data are opened.");
});

test("one visible GPU holds both modules, where each has one rank that needs it", () => {
	const resolve = (gpus: number | null, ...args: string[]) =>
		resolveConfiguration(["--preset", "nemotron-vlm-tiny", ...args], {}, { gpus });
	const offset = (gpus: number | null, ...args: string[]) => resolve(gpus, ...args).configuration.llmOffset;
	expect([null, 0, 1, 2, 8].map((gpus) => offset(gpus))).toEqual([1, 1, 0, 1, 1]);
	expect(offset(1, "--device", "cuda")).toBe(0);
	const others = ["--device cpu", "--distributed-backend shm", "--llm-dp 2 --global-batch-size 16", "--llm-offset 1"];
	expect(others.map((flags) => offset(1, ...flags.split(" ")))).toEqual([1, 1, 1, 1]);
	expect(offset(1, "--encoder-dp", "2", "--micro-batch-size", "2", "--global-batch-size", "16")).toBe(2);
	expect(offset(1, "--mimo-encoder-prefetch", "--freeze-vit", "--encoder-balance", "number")).toBe(1);
	expect(offset(1, "--llm-only")).toBe(0);
	const sentence = "One GPU is visible: encoder and language model share it in one process (llm-offset 0).";
	expect(resolve(1).notes).toContain(sentence);
	for (const { notes } of [resolve(2), resolve(1, "--llm-offset", "0"), resolve(1, "--llm-only")]) {
		expect(notes).not.toContain(sentence);
	}
});

test("adapters of the encoder need one that trains, and no dropout", () => {
	const model = ["--preset", "nemotron-vlm-tiny", "--lora-rank", "2", "--lora-target-modules"];
	const refusal = (targets: string, ...args: string[]) => mistakes(...model, targets, ...args);
	expect(refusal("vision_model.linear_fc1", "--freeze-vit")).toEqual([
		"--freeze-vit: the value is true; allowed is false with the target vision_model.linear_fc1, whose adapters train.",
	]);
	const projector = "vision_projection.linear_fc2";
	expect(refusal(projector, "--vision-projection-type", "mlp", "--freeze-projection")[0]).toContain(
		`allowed is false with the target ${projector}`,
	);
	expect(refusal(`linear_qkv,${projector}`)[0]).toEndWith(
		`${projector} is of an encoder with vision-projection-type mlp, which this model has not.`,
	);
	expect(refusal("vision_model.linear_qkv", "--llm-only")[0]).toContain("allowed is a projection that a layer of");
	expect(refusal("vision_model.linear_qkv", "--lora-dropout", "0.1")[0]).toStartWith(
		"--lora-dropout: the value is 0.1; allowed is 0 with the target vision_model.linear_qkv",
	);
	const part = "a PEFT folder has adapters alone, and this part trains whole.";
	for (const [needed, ...flags] of [
		["freeze-vit or targets of vision_model"],
		["freeze-projection or targets of vision_projection", "--freeze-vit"],
	] as const) {
		expect(refusal("linear_qkv", "--save-peft", "out", ...flags)).toEqual([
			`--save-peft: the value is "out"; it needs ${needed}: ${part}`,
		]);
	}
	expect(resolveConfiguration([...model, "vision_model.linear_qkv"]).configuration.loraTargetModules).toEqual([
		"vision_model.linear_qkv",
	]);
});
