/** Values that the keys of recomputation and of routing for benchmarks refuse, by name. */
import { expect, test } from "bun:test";
import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { UserError } from "../../../src/system/errors.ts";

const tiny = ["--preset", "nemotron-tiny", "--global-batch-size", "720"];
const resolve = (flags: string) => resolveConfiguration([...tiny, ...flags.split(" ")]).configuration;

test.each([
	[
		"--recompute-modules mlp",
		'--recompute-modules: the value is ["mlp"]; allowed only with recompute-granularity selective.',
	],
	[
		"--recompute-granularity full --recompute-modules mlp moe",
		'--recompute-modules: the value is ["mlp","moe"]; allowed only with recompute-granularity selective.',
	],
	[
		"--recompute-granularity selective --hybrid-layer-pattern ME-",
		"recompute-modules: allowed is a module that a layer of ME- has, and core_attn is a part of none.",
	],
	[
		"--recompute-granularity selective --recompute-modules shared_experts --moe-shared-expert-intermediate-size 0",
		'--recompute-modules: the value is ["shared_experts"]; allowed is a module that a layer of ME*-MEM has, and shared_experts is a part of none.',
	],
	[
		"--recompute-granularity selective --recompute-method block",
		'--recompute-method: the value is "block"; allowed only with recompute-granularity full.',
	],
	[
		"--recompute-granularity selective --recompute-num-layers 2",
		"--recompute-num-layers: the value is 2; allowed only with recompute-granularity full.",
	],
	[
		"--recompute-granularity selective --recompute-modules moe --llm-ep 2 --llm-dp 2 --overlap-moe-expert-parallel-comm",
		"--overlap-moe-expert-parallel-comm: the value is true; allowed without moe among recompute-modules, which runs an expert layer's nodes as one.",
	],
	[
		"--hybrid-layer-pattern M*- --moe-router-force-load-balancing",
		"--moe-router-force-load-balancing: the value is true; allowed only with a mixture of experts (E) in hybrid-layer-pattern.",
	],
])("%s", (flags, sentence) => {
	let message = "";
	try {
		resolve(flags);
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		({ message } = error);
	}
	expect(message).toBe(sentence);
});

test("names that are not modules, and Megatron's others, are refused", () => {
	const given = (names: string) => () => resolve(`--recompute-granularity selective --recompute-modules ${names}`);
	expect(given("attention")).toThrow(
		/--recompute-modules: .*attention.*allowed .*core_attn, mla_up_proj, layernorm, mamba/,
	);
	expect(given("mhc")).toThrow(/--recompute-modules: .*mhc.*not/);
});

test.each([
	["several at once", "--recompute-modules core_attn layernorm mamba mlp moe_act shared_experts"],
	["modules of which some layers have none", "--recompute-modules core_attn moe_act --hybrid-layer-pattern M*"],
	["passes in turns", "--recompute-modules moe_act --llm-ep 2 --llm-dp 2 --overlap-moe-expert-parallel-comm"],
	["late weight gradients", "--recompute-modules layernorm --delay-wgrad-compute"],
])("allowed: %s", (_, flags) => {
	const c = resolve(`--recompute-granularity selective ${flags}`);
	expect(c.recomputeModules!.length).toBeGreaterThan(0);
});
