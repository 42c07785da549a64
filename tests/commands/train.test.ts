import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fieldOf, keys } from "../../src/config/schema.ts";
import { mimo } from "./mimo.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-train-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** `mimo train` with a configuration file of this text; the lines it was refused with. */
function refusal(text: string, ...args: string[]): string[] {
	writeFileSync(join(folder, "run.yaml"), text);
	const { exitCode, stdout, stderr } = mimo(["train", "--config", "run.yaml", ...args], folder);
	expect([exitCode, stdout]).toEqual([2, ""]);
	expect(stderr).not.toMatch(/^\s+at /m);
	expect(readdirSync(folder)).toEqual(["run.yaml"]);
	return stderr.trimEnd().split("\n");
}

test("wrong types, bounds, names, duplicates and a bad pattern, all at once", () => {
	const lines = refusal(
		"preset: nemotron-tiny\nhidden-size: wide\nclip-grad: -1\nclip-grad: 1\nhiden-dropout: 0.1\nlog-json: out.json\n",
		"--hybrid-layer-pattern",
		"ME*[E",
		"--bf16=maybe",
		"--trian-iters",
		"3",
	);
	expect(lines[0]).toBe("mimo: 7 mistakes in the configuration:");
	expect(lines.slice(1).sort()).toEqual([
		'  --bf16: the value is "maybe"; allowed is true or false.',
		'  --hybrid-layer-pattern: the value is "ME*[E"; position 4: the group is not closed.',
		"  --trian-iters: there is no such flag; the nearest is --train-iters.",
		'  run.yaml:2: hidden-size is "wide"; allowed is an integer of at least 1.',
		"  run.yaml:3: clip-grad is -1; allowed is a number of at least 0.",
		"  run.yaml:4: clip-grad is given a second time.",
		"  run.yaml:5: there is no key hiden-dropout; the nearest is hidden-dropout.",
	]);
});

test("one mistake is one line", () => {
	expect(refusal("preset: nemotron-huge\n")).toEqual([
		`mimo: run.yaml:1: preset is "nemotron-huge"; allowed is ${fieldOf("preset").type.allowed}.`,
	]);
	expect(refusal("preset: nemotron-tiny\nlr: 1e\n")).toEqual([
		'mimo: run.yaml:2: lr is "1e"; allowed is a number of at least 0.',
	]);
});

test("a missing file is named", () => {
	const { exitCode, stderr } = mimo(["train", "--config", "absent.yaml"], folder);
	expect([exitCode, stderr]).toEqual([2, "mimo: --config absent.yaml: there is no such file.\n"]);
});

test("a folder is not a configuration file", () => {
	const { exitCode, stderr } = mimo(["train", "--config", folder]);
	expect([exitCode, stderr]).toEqual([2, `mimo: --config ${folder}: it cannot be read: it is a folder.\n`]);
});

test("a stray word is not a flag", () => {
	const { exitCode, stderr } = mimo(["train", "nemotron-tiny", "--preset", "nemotron-tiny"]);
	expect(exitCode).toBe(2);
	expect(stderr).toBe("mimo: nemotron-tiny: this is not a flag; flags start with -- and take one value.\n");
});

test("values that are not supported are refused by name", () => {
	const { exitCode, stderr } = mimo(["train", "--preset", "nemotron-20l", "--exp-avg-dtype", "fp8"]);
	expect(exitCode).toBe(2);
	expect(stderr).toContain(`exp-avg-dtype: the value is "fp8"; fp8 is not built yet; allowed is fp32 or bf16.`);
});

test("--print-config shows every key and where it came from", () => {
	writeFileSync(join(folder, "run.yaml"), "preset: nemotron-20l\nlr: 1e-3\n");
	const args = ["train", "--config", "run.yaml", "--print-config", "--seed", "7"];
	const { exitCode, stdout } = mimo(args, folder);
	expect(exitCode).toBe(0);
	expect(stdout).toMatch(/^lr +0\.001 +run\.yaml:2$/m);
	expect(stdout).toMatch(/^seed +7 +flag --seed$/m);
	expect(stdout).toMatch(/^hidden-size +2688 +preset nemotron-20l$/m);
	expect(stdout).toMatch(/^hidden-dropout +0 +default$/m);
	const json = JSON.parse(mimo([...args, "--json"], folder).stdout);
	expect(Object.keys(json.configuration)).toEqual([...keys]);
	expect(json.origins.lr).toBe("run.yaml:2");
});

test("--print-topology draws a layout", () => {
	const layout = "--encoder-tp 2 --encoder-dp 2 --llm-tp 2 --llm-dp 2 --llm-pp 7 --llm-ep 2".split(" ");
	const args = ["train", "--preset", "nemotron-tiny", "--model-provider", "nemotron-moe-vlm", ...layout];
	const { exitCode, stdout, stderr } = mimo([...args, "--print-topology"]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toStartWith("32 ranks: radio_encoder 0-3, language 4-31.");
	const json = mimo([...args, "--print-topology", "--json"]);
	expect([json.exitCode, JSON.parse(json.stdout).worldSize]).toEqual([0, 32]);
	const refused = mimo([...args, "--llm-offset", "3", "--print-topology"]);
	expect([refused.exitCode, refused.stdout]).toEqual([2, ""]);
	expect(refused.stderr).toBe(
		"mimo: --llm-offset: the value is 3; allowed is encoder-tp × encoder-dp (4), or 0 where both modules have equally many ranks: on rank 3 both modules would run.\n",
	);
});

test("--help has the everyday flags alone", () => {
	const { stdout } = mimo(["train", "--help"]);
	expect(stdout).toMatch(/^ {2}--lr NUMBER$/m);
	expect(stdout).not.toContain("--moe-router-topk");
	expect(stdout).toMatch(/\d+ more flags: --help all shows them, --help WORD those about a word\.\n$/);
});

test("--help all has every flag", () => {
	const { exitCode, stdout } = mimo(["train", "--help", "all"]);
	expect(exitCode).toBe(0);
	for (const key of keys) expect(stdout).toMatch(new RegExp(`^  --${key}( |$)`, "m"));
});

test("--help WORD lists only the flags about WORD", () => {
	const flagsIn = (text: string) => [...text.matchAll(/^ {2}--([\w-]+)/gm)].map(([, name]) => name!);
	const { exitCode, stdout } = mimo(["train", "--help", "wandb"]);
	expect(exitCode).toBe(0);
	expect(flagsIn(stdout)).toEqual(["wandb-save-dir", "wandb-project", "wandb-exp-name", "wandb-entity"]);
	const { stdout: router } = mimo(["plan", "--help", "MOE", "router_topk"]);
	expect(flagsIn(router)).toContain("moe-router-topk");
	expect(flagsIn(router)).not.toContain("moe-ffn-hidden-size");
	// Megatron's other spelling of llm-tp.
	expect(flagsIn(mimo(["--help", "tensor-model-parallel-size"]).stdout)).toEqual(["llm-tp"]);
	const none = mimo(["verify", "--help", "learning-rtae"]);
	expect([none.exitCode, none.stdout]).toEqual([2, ""]);
	expect(none.stderr).toStartWith("mimo: --help learning-rtae: no flag's name or description has that");
	expect(mimo(["--help", "train"]).stdout).toBe(mimo(["train", "--help"]).stdout);
});

test("a language model without data is refused before ranks start", () => {
	const { exitCode, stderr } = mimo(["train", "--preset", "nemotron-tiny", "--device", "cpu", "--llm-tp", "2"]);
	expect(exitCode).toBe(1);
	expect(stderr).toBe("mimo: A language model without an encoder trains on files: give --data-path.\n");
});
