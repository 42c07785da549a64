/** Adapters that two ranks train of families of language models: peft and transformers compute with them as mimo with the merged folder. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mimo } from "../commands/mimo.ts";
import { golden, largeGolden } from "../golden.ts";
import { logitsOf } from "../reference/own-logits.ts";
import { referencePython, runPython } from "../reference/python.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-peft-families-"));
afterAll(() => rmSync(folder, { recursive: true }));

writeFileSync(
	join(folder, "text.jsonl"),
	Array.from({ length: 20 }, (_, line) =>
		JSON.stringify({ text: Array.from({ length: 40 }, (_, word) => (line * 7 + word * word) % 100).join(" ") }),
	).join("\n"),
);
const tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256"];
const prepared = mimo(
	["data", "prepare-text", "--input", "text.jsonl", "--output-prefix", "text", ...tokenizer],
	folder,
);

const layouts = {
	"1": [],
	tp2: ["--llm-tp", "2", "--llm-expt-tp", "1"],
	pp2: ["--llm-pp", "2"],
	dp2: ["--llm-dp", "2"],
	dp2ep2: ["--llm-dp", "2", "--llm-ep", "2"],
};
type Layout = keyof typeof layouts;

/** Reference models that the repository does not hold. */
const larger = ["deepseek-v3", "nemotron-head80"];
const modelOf = (name: string) => (larger.includes(name) ? largeGolden(name) : golden(name));

/** A run of adapters of a family's reference model. */
function base(name: string, targets: readonly string[], layout: Layout = "1"): string[] {
	const data = ["--data-path", "text_text_document", "--split", "100,0,0", "--seq-length", "32", ...tokenizer];
	const batch = ["--micro-batch-size", "1", "--global-batch-size", "2", "--lr-warmup-iters", "0"];
	const adapters = ["--lora-target-modules", ...targets, ...layouts[layout]];
	return ["train", "--load-hf", modelOf(name)!, ...data, ...batch, ...adapters, "--device", "cpu"];
}

/** Trains adapters for two steps; writes them, and the model with them merged. */
function train(name: string, targets: readonly string[], layout: Layout = "1", out = name) {
	const steps = ["--lora-rank", "4", "--train-iters", "2", "--lr", "1e-2"];
	const outputs = ["--save-peft", `${out}-adapters`, "--save-hf", `${out}-merged`];
	return mimo([...base(name, targets, layout), ...steps, ...outputs], folder);
}

const attention = ["linear_qkv", "linear_proj"];
const dense = ["linear_fc1", "linear_fc2"];
const experts = ["experts.linear_fc1", "experts.linear_fc2"];
const latent = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"];
/** What peft loads of each family's reference models. */
const families: Readonly<Record<string, readonly string[]>> = {
	...Object.fromEntries(
		["llama", "llama-tied-bias", "mistral", "qwen2", "qwen3", "gemma3"].map((name) => [name, [...attention, ...dense]]),
	),
	...{ "qwen3-moe": [...attention, ...experts], "qwen3-moe-mixed": [...attention, ...dense, ...experts] },
	"qwen3-next": [...attention, ...dense, ...experts, "in_proj", "out_proj"],
	"qwen3-next-delta": [...dense, "in_proj", "out_proj"],
	...{ "qwen35-moe": [...attention, ...dense, "in_proj", "out_proj"], "gpt-oss": attention },
	"deepseek-v3": [...latent, ...dense, ...experts],
	...{ "deepseek-v3-mtp": [...latent, ...dense, ...experts], "deepseek-v3-noq": ["linear_proj", ...dense] },
	...{ "nemotron-latent": [...attention, ...dense, "in_proj"], "nemotron-head80": [...attention, ...dense, "in_proj"] },
};
const withExperts = /moe|next|oss|deepseek|latent/;
/** Runs by the folders' names: [family, layout]. */
const runs: ReadonlyMap<string, readonly [string, Layout]> = new Map(
	process.env.MIMO_TEST_FULL
		? Object.keys(families)
				.filter((name) => modelOf(name) !== null)
				.flatMap((name) =>
					(["tp2", "pp2", withExperts.test(name) ? "dp2ep2" : "dp2"] as const).map((layout) => [
						`${name}-${layout}`,
						[name, layout],
					]),
				)
		: [
				["qwen3-next", ["qwen3-next", "tp2"]],
				["deepseek-v3-noq", ["deepseek-v3-noq", "dp2ep2"]],
				["gemma3", ["gemma3", "pp2"]],
			],
);
const python = referencePython("torch", "transformers", "peft");

test.skipIf(python === null)(
	"logits of peft, of the merged folder and of mimo are equal, without a warning",
	async () => {
		expect(prepared.exitCode).toBe(0);
		const words = Array.from({ length: 40 }, (_, at) => (at * at * 3 + 5 * at) % 101);
		for (const [out, [name, layout]] of runs) {
			const { exitCode, stderr } = train(name, families[name]!, layout, out);
			expect([out, exitCode, stderr]).toEqual([out, 0, expect.anything()]);
			const flags = ["--load-hf", join(folder, `${out}-merged`), "--no-bf16", ...tokenizer];
			const { ids, logits } = await logitsOf(flags, [], words.join(" "), "text");
			expect(ids).toEqual(words);
			writeFileSync(join(folder, `${out}-logits`), logits);
		}
		const script = join(import.meta.dir, "../reference/text_adapters.py");
		const models = [...runs].map(([out, [name]]) => `${out}=${modelOf(name)}`);
		const found = JSON.parse(
			await runPython(python!, ["-W", "ignore", script, folder, words.join(), ...models]),
		) as Record<
			string,
			{ readonly warnings: string[]; readonly difference: number; readonly own: number; readonly change: number }
		>;
		for (const [name, { warnings, difference, own, change }] of Object.entries(found)) {
			expect([name, warnings]).toEqual([name, []]);
			const equal = [name, difference < 2e-5, own < 2e-5, change > 1e-3];
			if (process.env.MIMO_TEST_FULL) console.log(`${name}: ${Math.max(difference, own).toExponential(1)}`);
			expect([...equal, difference, own]).toEqual([name, true, true, true, expect.anything(), expect.anything()]);
		}
		// The folder comes back byte for byte from a run that changes nothing.
		const [name, out] = ["deepseek-v3-noq", process.env.MIMO_TEST_FULL ? "deepseek-v3-noq-dp2ep2" : "deepseek-v3-noq"];
		const again = ["--load-peft", `${out}-adapters`, "--save-peft", "again", "--train-iters", "1", "--lr", "0"];
		expect(mimo([...base(name, families[name]!), ...again], folder)).toMatchObject({ exitCode: 0 });
		for (const file of ["adapter_config.json", "adapter_model.safetensors"]) {
			const [one, other] = [`${out}-adapters`, "again"].map((at) => readFileSync(join(folder, at, file)));
			expect([file, one!.equals(other!)]).toEqual([file, true]);
		}
		const config = JSON.parse(readFileSync(join(folder, `${out}-adapters/adapter_config.json`), "utf8"));
		expect(config.target_parameters).toContain("model.layers.0.mlp.gate_proj.weight");
	},
	900_000,
);

test("adapters that peft would leave out are refused before the first step", () => {
	const alone = train("qwen3-moe", ["experts.linear_fc1"]);
	expect(alone.exitCode).toBe(1);
	expect(alone.stderr).toContain("peft loads adapters of experts.linear_fc1 only beside those of experts.linear_fc2");
	for (const kind of ["adapters", "merged"]) {
		rmSync(join(folder, `qwen35-moe-${kind}`), { recursive: true, force: true });
	}
	const other = train("qwen35-moe", experts);
	expect(other.exitCode).toBe(1);
	expect(other.stderr).toContain("peft does not load adapters of qwen3_5_moe_text's routed experts");
});
