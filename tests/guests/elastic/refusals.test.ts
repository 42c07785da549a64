/** Refusals of elastic keys as the command line prints them: one sentence that names the key, before any rank starts. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { Scratch } from "../../data/fixtures.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const plain = `train --preset nemotron-tiny --hybrid-layer-pattern ME*E --seq-length 64 --dataset-provider text --data-path text.txt ${deviceFlags} --train-iters 30`;
const elastic = `${plain} --flextron --enable-router --moe-router-bias-update-rate 0`;

beforeAll(() => {
	folder.file("text.txt", "the quick brown fox jumps over the lazy dog and runs away. ".repeat(20));
	folder.file("profiles.yaml", "own: { bpe_params: 2, param_budget_target: both }\n");
	folder.file("broken.yaml", "own: [\n");
});

function refused(command: string, sentence: string): void {
	const { exitCode, stderr } = mimo(command.split(" "), folder.path);
	expect([exitCode > 0, stderr]).toEqual([true, `mimo: ${sentence}.\n`]);
}

describe("lists of sizes", () => {
	test.each([
		["--emb-per-list 1 1.5", "--emb-per-list: the value is [1,1.5]; allowed is one or more of: a number from 0 to 1"],
		["--emb-per-list 1 -0.5", "--emb-per-list: the value is [1,-0.5]; allowed is one or more of: a number from 0 to 1"],
		[
			"--emb-per-list 1 0.5 --emb-int-list 128 64",
			"emb-per-list and emb-int-list are both given; allowed is one of them, not both",
		],
		["--emb-int-list 128 256", "emb-int-list has 256 after 128; allowed are falling sizes"],
		[
			"--emb-int-list 128 0",
			"--emb-int-list: the value is [128,0]; allowed is one or more of: an integer of at least 1",
		],
		["--emb-int-list 64 32", "emb-int-list begins with 64; allowed is the parent's 128 first"],
		["--emb-int-list 128 64 96", "emb-int-list has 96 after 64; allowed are falling sizes"],
		["--emb-int-list 128 64 64", "emb-int-list has 64 after 64; allowed are falling sizes"],
		["--mamba-int-list 8 3", "mamba-int-list has 3; allowed are multiples of mamba-num-groups (2)"],
		["--mamba-int-list 16 8", "mamba-int-list begins with 16; allowed is the parent's 8 first"],
		["--moe-expert-int-list 8 1", "moe-expert-int-list has 1; allowed are at least moe-router-topk (2)"],
		[
			"--moe-expert-int-list 8 4 --moe-router-num-groups 2 --moe-router-group-topk 1",
			"moe-expert-int-list has 4; allowed are all 8 experts where they lie in 2 groups (moe-router-num-groups)",
		],
		[
			"--mlp-int-list 128 33 --llm-tp 2 --llm-expt-tp 2",
			"mlp-int-list has 33; allowed are multiples of the expert tensor parallelism (2)",
		],
		["--head-int-list 4 3", "head-int-list has 3; allowed are multiples of num-query-groups (2)"],
		["--hybrid-layer-pattern M* --mlp-int-list 128 64", "mlp-int-list: the pattern has no layer E"],
		["--add-skipping", "--add-skipping: the value is true; it needs layer-ranking-list"],
		["--layer-ranking-list 1", "--layer-ranking-list: the value is [1]; it needs add-skipping"],
		["--add-skipping --layer-ranking-list 1 1", "layer-ranking-list has 1 twice"],
		["--add-skipping --layer-ranking-list 9", "layer-ranking-list has 9; allowed are layers 0 to 3"],
		[
			"--add-skipping --layer-ranking-list 0 1 2 3",
			"layer-ranking-list has every layer; allowed is a ranking that leaves one out",
		],
	])("%s", (flags, sentence) => refused(`${elastic} ${flags}`, sentence));
});

test("a balancing type none may have a coefficient beside soft-mask", () => {
	const line = `${elastic} --soft-mask --moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-4`;
	expect(resolveConfiguration(line.split(" ").slice(1)).configuration.moeAuxLossCoeff).toEqual([1e-4]);
});

describe("budgets", () => {
	test.each([
		[
			"--budget-list 1 0.5 --budget-probs 1",
			"--budget-probs: the value is [1]; allowed is one number for each of budget-list (2)",
		],
		[
			"--budget-list 1 0.5 --budget-probs 0 0",
			"--budget-probs: the value is [0,0]; allowed are numbers of which one is greater than 0",
		],
		["--budget-list 1 0", "--budget-list: the value is [1,0]; allowed is one or more of: a number greater than 0"],
		["--budget-list 1.5", "--budget-list: the value is [1.5]; allowed with budget-type param are shares of at most 1"],
		["--budget-list 1 1", "--budget-list: the value is [1,1]; allowed is each budget once"],
		["--emb-int-list 128 64 --budget-list 1 0.1", "budget-list has 0.1; the sizes reach 0.5025 to 1.0000"],
		["--budget-type mem --budget-list 20", "budget-list has 20 GB; the sizes reach 0.0438 GB to 0.0438 GB"],
		["--budget-type time", '--budget-type: the value is "time"; allowed is param or mem'],
		["--memory-profile fp7", "memory-profile is fp7; allowed are bf16, fp8_kv, fp8_kv_ssm, fp8_all, int8, fp4"],
		["--memory-profile-path none.yaml", "Cannot open memory-profile-path none.yaml: it does not exist"],
		[
			"--memory-profile-path profiles.yaml --memory-profile own",
			'profiles.yaml: own.param_budget_target is "both"; allowed is active or total',
		],
		["--param-budget-target both", '--param-budget-target: the value is "both"; allowed is active or total'],
		["--override-selected-budget 0.5", "--override-selected-budget: the value is [0.5]; it needs is-flex-eval"],
		["--is-flex-eval", "--is-flex-eval: the value is true; it needs override-selected-budget"],
	])("%s", (flags, sentence) => refused(`${elastic} ${flags}`, sentence));

	test("a profile file that is not YAML", () => {
		const { exitCode, stderr } = mimo(`${elastic} --memory-profile-path broken.yaml`.split(" "), folder.path);
		expect([exitCode > 0, stderr.split("\n").length]).toEqual([true, 2]);
		expect(stderr).toStartWith("mimo: broken.yaml is neither YAML nor JSON: ");
	});
});

describe("what an elastic model cannot be combined with", () => {
	test.each([
		[`${plain} --enable-router`, "--enable-router: the value is true; it needs flextron"],
		[`${plain} --flextron`, "--flextron: the value is true; it needs enable-router"],
		[`${plain} --emb-int-list 128 64`, "--emb-int-list: the value is [128,64]; it needs flextron"],
		[
			`${elastic} --soft-mask --moe-router-score-function softmax --no-moe-router-enable-expert-bias --moe-aux-loss-coeff 0`,
			'--moe-router-score-function: the value is "softmax"; allowed with soft-mask is sigmoid',
		],
		[
			`${elastic} --hybrid-layer-pattern MEX`,
			'--hybrid-layer-pattern: the value is "MEX"; position 3: "X" is not a layer symbol; allowed are M, G, *, +, - and E',
		],
		[
			`${elastic} --hybrid-layer-pattern ME/ME --mtp-num-layers 1`,
			'--hybrid-layer-pattern: the value is "ME/ME"; allowed with flextron is a pattern without multi-token prediction',
		],
		[
			`${elastic} --add-bias-linear --moe-shared-expert-intermediate-size 0`,
			"--add-bias-linear: the value is true; allowed with flextron is false: a mask cannot scale a bias away",
		],
		[
			`${elastic} --normalization LayerNorm`,
			'--normalization: the value is "LayerNorm"; allowed with flextron is RMSNorm',
		],
		[
			`${elastic} --num-experts-per-layer 8 16`,
			"--num-experts-per-layer: the value is [8,16]; allowed only without flextron: a parent's layers of a kind are alike",
		],
		[`${elastic} --lora-rank 4`, "--lora-rank: the value is 4; allowed only without flextron"],
		[
			`${elastic} --cuda-graph-impl local`,
			'--cuda-graph-impl: the value is "local"; allowed with flextron is none: masks change every microbatch',
		],
		[
			`${elastic} --freeze-router --freeze-model`,
			"--freeze-model: the value is true; allowed is one of freeze-router and freeze-model",
		],
		[
			`${elastic} --freeze-lm`,
			"--freeze-lm: the value is true; allowed with flextron is false; freeze-model freezes all but the router",
		],
	])("%s", refused);
});
