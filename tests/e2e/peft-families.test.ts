/** Adapters of families of language models: peft and transformers compute with them as with the merged folder. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mimo } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
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

/** A run of adapters of a family's reference model. */
function base(name: string, targets: readonly string[]): string[] {
	const data = ["--data-path", "text_text_document", "--split", "100,0,0", "--seq-length", "32", ...tokenizer];
	const batch = ["--micro-batch-size", "1", "--global-batch-size", "2", "--lr-warmup-iters", "0"];
	const adapters = ["--lora-target-modules", ...targets];
	return ["train", "--load-hf", golden(name), ...data, ...batch, ...adapters, "--device", "cpu"];
}

/** Trains adapters for two steps; writes them, and the model with them merged. */
function train(name: string, targets: readonly string[]) {
	const steps = ["--lora-rank", "4", "--train-iters", "2", "--lr", "1e-2"];
	const outputs = ["--save-peft", `${name}-adapters`, "--save-hf", `${name}-merged`];
	return mimo([...base(name, targets), ...steps, ...outputs], folder);
}

const attention = ["linear_qkv", "linear_proj"];
const dense = ["linear_fc1", "linear_fc2"];
const experts = ["experts.linear_fc1", "experts.linear_fc2"];
const families = {
	"qwen3-next": [...attention, ...dense, ...experts, "in_proj", "out_proj"],
	"deepseek-v3-noq": ["linear_proj", ...dense],
	...(process.env.MIMO_TEST_FULL && {
		llama: [...attention, ...dense],
		gemma3: [...attention, ...dense],
		"gpt-oss": attention,
		"qwen3-moe-mixed": [...attention, ...dense, ...experts],
		"qwen35-moe": [...dense, "in_proj"],
	}),
};
const python = referencePython("torch", "transformers", "peft");

test.skipIf(python === null)("logits of peft are those of the merged folder, without a warning", async () => {
	expect(prepared.exitCode).toBe(0);
	for (const [name, targets] of Object.entries(families)) {
		const { exitCode, stderr } = train(name, targets);
		expect([name, exitCode, stderr]).toEqual([name, 0, expect.anything()]);
	}
	const script = join(import.meta.dir, "../reference/text_adapters.py");
	const models = Object.keys(families).map((name) => `${name}=${golden(name)}`);
	const found = JSON.parse(await runPython(python!, ["-W", "ignore", script, folder, ...models])) as Record<
		keyof typeof families,
		{ readonly warnings: string[]; readonly difference: number; readonly change: number }
	>;
	for (const [name, { warnings, difference, change }] of Object.entries(found)) {
		expect([name, warnings]).toEqual([name, []]);
		expect([name, difference < 2e-5, change > 1e-3, difference]).toEqual([name, true, true, expect.anything()]);
	}
	// The folder comes back byte for byte from a run that changes nothing.
	const name = "deepseek-v3-noq";
	const again = ["--load-peft", `${name}-adapters`, "--save-peft", "again", "--train-iters", "1", "--lr", "0"];
	expect(mimo([...base(name, families[name]), ...again], folder)).toMatchObject({ exitCode: 0 });
	for (const file of ["adapter_config.json", "adapter_model.safetensors"]) {
		const [one, other] = [`${name}-adapters`, "again"].map((at) => readFileSync(join(folder, at, file)));
		expect([file, one!.equals(other!)]).toEqual([file, true]);
	}
	const config = JSON.parse(readFileSync(join(folder, "deepseek-v3-noq-adapters/adapter_config.json"), "utf8"));
	expect(config.target_parameters).toContain("model.layers.0.mlp.gate_proj.weight");
});

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
