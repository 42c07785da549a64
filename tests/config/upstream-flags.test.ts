/** Flags and files of Megatron-LM and of the Nemotron VLM branch as they are, and what each of them means here. */
import { afterAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { resolveConfiguration } from "../../src/config/resolve.ts";
import { keyOf } from "../../src/config/schema.ts";
import { upstreamFlagTexts } from "../../src/config/upstream-flags.ts";
import { elasticOf } from "../../src/guests/elastic/from-configuration.ts";
import { topologyOf } from "../../src/parallel/topology.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-upstream-"));
afterAll(() => rmSync(folder, { recursive: true }));

const upstream = (name: string) => join(import.meta.dir, "upstream", name);

/** Arguments of a line as a shell reads it. */
const words = (text: string) => [...text.matchAll(/"([^"]*)"|\S+/g)].map(([word, quoted]) => quoted ?? word);

const resolve = (line: string, ranks: number | null = null) => resolveConfiguration(words(line), {}, { ranks });

/** The sentences of a refused configuration. */
function mistakes(line: string): string[] {
	try {
		resolve(line);
	} catch (error) {
		return (error as Error).message.split("\n").map((sentence) => sentence.trim());
	}
	throw new Error(`accepted: ${line}`);
}

const tiny = "--preset nemotron-tiny";
const pattern = (line: string) => resolve(`${tiny} ${line}`).configuration.hybridLayerPattern;
/** The same for a language model that only these flags describe. */
const bare = (line: string) =>
	resolve(`--hidden-size 64 --vocab-size 128 --num-attention-heads 4 --mamba-num-groups 1 --train-iters 1 ${line}`)
		.configuration.hybridLayerPattern;

test("no flag of the table is a key, and each says in a sentence what stands for it", () => {
	const texts = [...upstreamFlagTexts()];
	expect(texts.flatMap(([, names]) => names).filter((name) => keyOf(name) !== undefined)).toEqual([]);
	for (const [text] of texts) expect(text).toMatch(/^[a-zA-Z]\S*( |$).*[^.]$/);
});

test("an accepted flag leaves one note, on a command line and in a file", () => {
	expect(resolve(`${tiny} --spec a b --binary-mask`).notes).toEqual([
		"--spec: hybrid-layer-pattern says the layers, and every kind has one implementation.",
		"--binary-mask: Megatron's masks do not depend on it; here too a choice masks the parent's units.",
	]);
	const file = join(folder, "run.yaml");
	writeFileSync(file, "preset: nemotron-tiny\nis_hybrid_model: true\nfp32: false\n");
	expect(resolve(`--config ${file}`).notes).toEqual([
		`${file}:2: is-hybrid-model: hybrid-layer-pattern describes every model.`,
	]);
});

test("a refused flag names its counterpart", () => {
	expect(mistakes(`${tiny} --use-megatron-fsdp`)).toEqual([
		"--use-megatron-fsdp: there is no FSDP; use-distributed-optimizer shards the optimizer.",
	]);
	expect(mistakes(`${tiny} --use-tp-pp-dp-mapping --grpo-group-size 4`).slice(1)).toEqual([
		"--use-tp-pp-dp-mapping: ranks count tp, dp, pp; --print-topology shows them.",
		"--grpo-group-size: there is no reinforcement learning.",
	]);
	expect(mistakes(`${tiny} --grpo-group-size 4 --encoder-cp 2`)).toEqual([
		"2 mistakes in the configuration:",
		"--grpo-group-size: there is no reinforcement learning.",
		"--encoder-cp: allowed is 1: the encoder has encoder-tp, encoder-dp and encoder-pp.",
	]);
});

test("stages freeze, providers are presets, and the branch corrects partial participation", () => {
	const at = (line: string) => resolve(`--model-provider nemotron-moe-vlm-54l --train-iters 1 ${line}`).configuration;
	expect(at("")).toMatchObject({
		modelProvider: "nemotron-moe-vlm",
		...{ numLayers: 54, freezeVit: true, freezeLm: false, encoderGradParticipation: "corrected" },
		...{ visionProjectionType: "mlp", visionProjectionFfnHiddenSize: 20480, dynamicResolution: true, useTiling: false },
	});
	expect(at("--training-stage stage1")).toMatchObject({ freezeVit: true, freezeLm: true });
	expect(at("--training-stage stage3")).toMatchObject({ freezeVit: false, freezeLm: false });
	expect(at("--no-correct-encoder-grad-for-partial-participation").encoderGradParticipation).toBe("exact");
	expect(at("--no-dynamic-resolution")).toMatchObject({ useTiling: true, useThumbnail: true });
	expect(mistakes(`${tiny} --training-stage stage4`)[0]).toContain("allowed is stage1");
});

test("in the branch's loop samples win over steps; elsewhere both are refused", () => {
	const both = "--train-iters 5 --train-samples 800 --lr-warmup-iters 2 --lr-warmup-samples 8";
	const { configuration } = resolve(`--model-provider nemotron-moe-vlm-20l ${both}`);
	expect(configuration).toMatchObject({ trainIters: null, trainSamples: 800, lrWarmupIters: 0, lrWarmupSamples: 8 });
	expect(mistakes(`${tiny} ${both}`).join()).toContain("allowed is one of train-iters and train-samples");
});

test("ratios of layers give Megatron's pattern", () => {
	const ratios = (layers: number, attention: number, mlp: number) =>
		bare(`--num-layers ${layers} --hybrid-attention-ratio ${attention} --hybrid-mlp-ratio ${mlp}`);
	const patterns = Array.from({ length: 64 }, (_, at) =>
		[0, 0.08, 0.1, 0.125, 0.25, 0.5].map((attention) =>
			[0, 0.1, 0.25, 0.5].map((mlp) => ratios(at + 1, attention, mlp)),
		),
	).flat(2);
	// pattern_from_ratios of megatron/core/models/hybrid/hybrid_layer_allocation.py (2026-08-22) for the same 1536 settings.
	expect(new Bun.CryptoHasher("sha256").update(patterns.join("\n")).digest("hex")).toBe(
		"d34423a8f79633959f14174714f11ba9b05ef80dea0fc6f9bb38cbc600019519",
	);
	expect(
		bare("--num-layers 4 --hybrid-attention-ratio 0.25 --mtp-hybrid-override-pattern *M --mtp-num-layers 2"),
	).toMatch(/^[M*]{4}\/\*M\/\*M$/);
	expect(mistakes(`--num-layers 4 --hybrid-attention-ratio 0.8 --hybrid-mlp-ratio 0.8`).join()).toContain(
		"--hybrid-attention-ratio: allowed are ratios whose sum is at most 1",
	);
});

test("a number of layers alone is a GPT model", () => {
	expect(bare("--num-layers 2")).toBe("[*-][*-]");
	expect(bare("--num-layers 3 --num-experts 4")).toBe("[*E][*E][*E]");
	expect(bare("--num-layers 4 --num-experts 4 --moe-layer-freq 2")).toBe("[*E][*-][*E][*-]");
	expect(bare("--num-layers 4 --num-experts 4 --moe-layer-freq ([0]*3+[1]*1)")).toBe("[*-][*-][*-][*E]");
	const latents = "--num-layers 2 --num-experts 4 --moe-layer-freq [0,1] --mtp-num-layers 1 --multi-latent-attention";
	expect(bare(latents)).toBe("[+-][+E]/+E");
	const variant = "--experimental-attention-variant gdn --linear-attention-freq";
	expect(bare(`--num-layers 5 ${variant} 4`)).toBe("[G-][G-][G-][*-][G-]");
	expect(bare(`--num-layers 3 --num-experts 4 ${variant} [1]*2+[0]`)).toBe("[GE][GE][*E]");
	expect(mistakes("--num-layers 2 --experimental-attention-variant dsa").join()).toContain(
		"--experimental-attention-variant: allowed is gdn or gated_delta_net",
	);
	expect(bare("--num-layers 2 --num-experts 4 --mtp-num-layers 1")).toBe("[*E][*E]/*E");
	expect(mistakes("--num-layers 2 --num-experts 4 --moe-layer-freq [1,0,1]").join()).toContain(
		"--moe-layer-freq: it describes 3 layers, and num-layers is 2",
	);
	const { notes, configuration } = resolve(
		"--hidden-size 64 --vocab-size 128 --num-attention-heads 4 --num-layers 1 --train-iters 1",
	);
	expect(notes).toEqual(["num-layers 1 without hybrid-layer-pattern is a GPT model: hybrid-layer-pattern is [*-]."]);
	expect(configuration.numLayers).toBe(2);
});

test("pipeline cuts become | between layers or bracket groups", () => {
	const cut = (line: string) => bare(`--num-layers 8 --pipeline-model-parallel-size 2 ${line}`).replaceAll("[*-]", "t");
	expect(cut("--decoder-first-pipeline-num-layers 3")).toBe("ttt|ttttt");
	expect(cut("--num-layers-in-last-pipeline-stage 3")).toBe("ttttt|ttt");
	expect(cut("--num-layers-per-virtual-pipeline-stage 2")).toBe("tt|tt|tt|tt");
	expect(cut("--num-virtual-stages-per-pipeline-rank 4")).toBe("t|t|t|t|t|t|t|t");
	expect(cut("--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2")).toBe("t|ttt|t|ttt");
	expect(cut('--pipeline-model-parallel-layout "Et*3|(tt|)*2,tL"')).toBe("ttt|tt|tt|t");
	expect(pattern("--llm-pp 2 --decoder-first-pipeline-num-layers 3")).toBe("ME*|-MEM");
	// Going on from a checkpoint, whose pattern has the cuts already.
	expect(pattern("--llm-pp 2 --hybrid-layer-pattern ME*|-MEM --decoder-first-pipeline-num-layers 3")).toBe("ME*|-MEM");
	for (const [line, message] of [
		[
			"--llm-pp 2 --hybrid-layer-pattern ME|*-MEM --decoder-first-pipeline-num-layers 3",
			"says with | where stages begin",
		],
		["--llm-pp 3 --decoder-first-pipeline-num-layers 2", "5 layers do not lie evenly on 2 other stages (llm-pp 3)"],
		["--llm-pp 2 --pipeline-model-parallel-layout Et|tL", "it places 2 layers, and the model has 7"],
		["--llm-pp 2 --pipeline-model-parallel-layout tt|tL", "allowed is E, layers t"],
		["--num-virtual-stages-per-pipeline-rank 2", "have no equal virtual stages of that number"],
	] as const) {
		expect(mistakes(`${tiny} ${line}`).join()).toContain(message);
	}
});

test("sizes that follow from others are computed or compared", () => {
	expect(resolve(`${tiny} --global-batch-size 8 --num-microbatches 2`).configuration.globalBatchSize).toBe(8);
	expect(mistakes(`${tiny} --global-batch-size 8 --num-microbatches 3`)[0]).toContain(
		"it makes 12, and global-batch-size is 8",
	);
	expect(mistakes(`${tiny} --llm-tp 2 --llm-dp 2 --llm-ep 2 --llm-expt-dp 1`)[0]).toContain(
		"--llm-expt-dp: allowed is 2",
	);
});

test("the launcher's ranks give the data-parallel size", () => {
	const dp = (line: string, ranks: number) =>
		resolve(`${tiny} --micro-batch-size 1 ${line}`, ranks).configuration.llmDp;
	expect(dp("--tensor-model-parallel-size 2", 8)).toBe(4);
	expect(dp("--pipeline-model-parallel-size 2 --hybrid-layer-pattern ME|ME", 4)).toBe(2);
	expect(dp("--llm-dp 1", 8)).toBe(1);
	// No whole number: the run says how many ranks it needs.
	expect(dp("--llm-tp 2", 3)).toBe(1);
	const vlm = resolve("--preset nemotron-vlm-tiny --encoder-dp 2 --llm-tp 2", 6).configuration;
	expect([vlm.llmDp, vlm.llmOffset]).toEqual([2, 2]);
	expect(resolve("--preset nemotron-vlm-tiny --encoder-dp 2 --llm-offset 0 --llm-tp 2", 2).configuration.llmDp).toBe(1);
	expect(resolveConfiguration(words(`${tiny} --nproc 2`), { nproc: true }).configuration.llmDp).toBe(2);
});

test("the image token's id comes from the tokenizer", () => {
	const tokenizer = join(folder, "tokenizer");
	mkdirSync(tokenizer);
	writeFileSync(join(tokenizer, "tokenizer.json"), '{"added_tokens": [{"id": 18, "content": "<image>"}]}');
	const line = `--model-provider nemotron-moe-vlm-20l --train-iters 1 --tokenizer ${tokenizer} --image-token`;
	expect(resolve(`${line} <image>`).configuration.imageTokenId).toBe(18);
	expect(mistakes(`${line} <video>`)[0]).toContain("has no special token <video>");
	expect(mistakes(`${line.replace(tokenizer, "nowhere")} <image>`)[0]).toContain(
		"nowhere/tokenizer.json does not exist",
	);
});

/** Mistakes about unknown flags. */
function unknownFlags(line: string): string[] {
	try {
		resolve(line);
		return [];
	} catch (error) {
		return (error as Error).message.split("\n").filter((text) => /there is no such flag/.test(text));
	}
}

test("every flag of upstream's scripts and tests is known", () => {
	process.env.DATA_PATH = folder;
	for (const name of ["DATA_CACHE_PATH", "TENSORBOARD_PATH", "CHECKPOINT_SAVE_PATH"]) process.env[name] = folder;
	expect(unknownFlags(`--config ${upstream("elastic-nightly.yaml")}`)).toEqual([]);
	expect(unknownFlags(`--config ${upstream("op-fuser.yaml")}`)).toEqual([]);
	const script = readFileSync(upstream("branch-33-nodes.txt"), "utf8").replaceAll(/^#.*$/gm, "");
	expect(unknownFlags(script)).toEqual([]);
});

test("a functional test of Megatron is a configuration", () => {
	const file = join(folder, "model_config.yaml");
	writeFileSync(
		file,
		[
			"ENV_VARS:\n  NCCL_ALGO: Ring\n  NVTE_X: 1\nMODEL_ARGS:\n  --preset: nemotron-tiny\n  --bf16: true\n  --swiglu: false",
			'  --spec: a b\n  --budget-list: "[1.0 0.697]"\n  --save: $MIMO_TEST_UNSET/x\n  --log-interval: 3\nMETRICS: []\nTEST_TYPE: regular\n',
		].join("\n"),
	);
	const { configuration, origins, notes } = resolve(`--config ${file} --save s`);
	expect(configuration).toMatchObject({ bf16: true, swiglu: false, budgetList: [1, 0.697], logInterval: 3, save: "s" });
	expect(origins["log-interval"]).toEqual({ source: "file", file, line: 11 });
	expect(notes[0]).toBe(
		`${file}:8: --spec: hybrid-layer-pattern says the layers, and every kind has one implementation.`,
	);
	expect(notes[1]).toContain("NCCL reads NCCL_ALGO where the shell exports it");
	expect(mistakes(`--config ${file}`)).toEqual([
		`${file}:10: --save is $MIMO_TEST_UNSET/x, and the environment has no MIMO_TEST_UNSET; set it, or give --save.`,
	]);
});

/** The branch's production script, with a tokenizer that exists. */
function script33(): string {
	const tokenizer = join(folder, "branch-tokenizer");
	mkdirSync(tokenizer, { recursive: true });
	writeFileSync(join(tokenizer, "tokenizer.json"), '{"added_tokens": [{"id": 18, "content": "<image>"}]}');
	const script = readFileSync(upstream("branch-33-nodes.txt"), "utf8").replaceAll(/^#.*$/gm, "");
	return script.replace("--tokenizer-model tok", `--tokenizer ${tokenizer}`);
}

test("the branch's script of 33 nodes is its recipe", () => {
	const own = resolve("--config examples/nemotron-branch/nodes-33.yaml --data-path blend.yaml").configuration;
	const theirs = resolve(script33()).configuration;
	const differing = Object.keys(own).filter((key) => !Bun.deepEquals(own[key as "lr"], theirs[key as "lr"]));
	// The script's files, its tokenizer's image token and the sizes that it says twice.
	expect(differing.sort()).toEqual(
		[
			...["ddpBucketSize", "imageTokenId", "noLoadOptim", "noLoadRng", "pretrainedCheckpoint", "save", "saveInterval"],
			...["tensorboardDir", "tokenizer"],
		].sort(),
	);
	expect([theirs.numLayers, theirs.trainIters, theirs.imageTokenId]).toEqual([54, null, 18]);
});

test.each([...new Bun.Glob("examples/nemotron-branch/*.yaml").scanSync(".")])(
	"%s has the ranks of its nodes",
	(file) => {
		const c = resolve(`--config ${file} --data-path blend.yaml`).configuration;
		const nodes = Number(/--nodes=(\d+)/.exec(readFileSync(file, "utf8"))![1]);
		expect(topologyOf(c).worldSize).toBe(8 * nodes);
		expect(c.numLayers).toBe(54);
	},
);

test("elastic presets have sizes for every budget", () => {
	for (const preset of ["nemotron-elastic-12b", "nemotron-elastic-30b-a3b"]) {
		const line = `--preset ${preset} --train-iters 1`;
		expect(elasticOf(resolve(line).configuration)).not.toBeNull();
		expect(() => elasticOf(resolve(`${line} --budget-list 1 0.1`).configuration)).toThrow("budget-list has 0.1");
	}
});
