/** The language model on several processes: losses and every gradient equal those of one process. */
import { beforeAll, describe, expect, test } from "bun:test";
import { recomputeModuleNames } from "../../src/config/recompute-modules.ts";
import type { StepResult } from "../../src/train/step-state.ts";
import { relativeRms } from "../support.ts";
import { runRanks } from "./ranks.ts";
import { type PrintedGradients, wholeGradients } from "./whole-gradients.ts";

interface RankResult extends PrintedGradients {
	readonly losses: readonly StepResult[];
	/** Hash of all weights after three steps. */
	readonly weights: string;
}

const one = {
	...{ tensor: 1, data: 1, pipeline: 1, expert: 1, expertTensor: 1, zero: false, dropout: 0 },
	pattern: null as string | null,
	tied: false,
	keys: {} as Readonly<Record<string, unknown>>,
};

async function train(layout: Partial<typeof one>): Promise<RankResult[]> {
	const full = { ...one, ...layout };
	const outcomes = await runRanks("language-rank.ts", full.tensor * full.data * full.pipeline, [JSON.stringify(full)]);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	return outcomes.map(({ stdout }) => JSON.parse(stdout) as RankResult);
}

function expectEqualTraining(ranks: readonly RankResult[], reference: RankResult): void {
	const expected = wholeGradients([reference]);
	const actual = wholeGradients(ranks);
	expect([...actual.keys()].sort()).toEqual([...expected.keys()].sort());
	for (const [name, gradient] of expected) {
		expect({ name, close: relativeRms(actual.get(name)!, gradient) < 1e-5 }).toEqual({ name, close: true });
	}
	for (const { losses } of ranks) {
		losses.forEach((result, step) => {
			const wanted = reference.losses[step]!;
			expect(result.tokens).toBe(wanted.tokens);
			expect(Math.abs(result.loss / wanted.loss - 1)).toBeLessThan(2e-6);
			expect(Math.abs(result.gradientNorm / wanted.gradientNorm - 1)).toBeLessThan(1e-5);
			expect(Math.abs(result.parametersNorm! / wanted.parametersNorm! - 1)).toBeLessThan(1e-6);
			expect(result.zeroGradients).toBe(wanted.zeroGradients);
			for (const [name, value] of Object.entries(wanted.balancing)) {
				expect(Math.abs(result.balancing[name]! / value - 1)).toBeLessThan(1e-5);
			}
		});
	}
}

describe("losses, norms and every gradient equal one process's", () => {
	let reference: RankResult;
	beforeAll(async () => {
		reference = (await train({}))[0]!;
	});
	const layouts: Record<string, Partial<typeof one>> = {
		tp2: { tensor: 2 },
		dp2: { data: 2 },
		"dp2 ep2": { data: 2, expert: 2 },
		"tp2 ep2": { tensor: 2, expert: 2 },
		"tp2 etp2": { tensor: 2, expertTensor: 2 },
		"tp2 dp2 ep2": { tensor: 2, data: 2, expert: 2 },
		"tp2 dp2 ep2 etp2": { tensor: 2, data: 2, expert: 2, expertTensor: 2 },
		pp2: { pipeline: 2, pattern: "ME*|-MEM" },
		"tp2 pp2": { tensor: 2, pipeline: 2, pattern: "ME*-ME|M" },
		"dp2 ep2 pp2": { data: 2, expert: 2, pipeline: 2, pattern: "ME|*-|M|EM" },
	};
	for (const [name, layout] of Object.entries(layouts)) {
		test(name, async () => expectEqualTraining(await train(layout), reference));
	}
});

test("latent experts, a gate of the shared expert and zero-centred norms, some behind layers, on every layout", async () => {
	const norms = { "apply-layernorm-1p": true, "qk-layernorm": true, "post-layernorm": true, "embedding-multiplier": 8 };
	const keys = { "moe-latent-size": 24, "moe-shared-expert-gate": true, ...norms };
	const reference = (await train({ keys }))[0]!;
	for (const layout of [
		{ tensor: 2, expert: 2 },
		{ data: 2, expert: 2 },
		{ pipeline: 2, pattern: "ME*|-MEM" },
	]) {
		expectEqualTraining(await train({ keys, ...layout }), reference);
	}
}, 60_000);

test("Gated DeltaNet and gated attention on every layout, and recomputed", async () => {
	const sizes = { "linear-key-head-dim": 12, "linear-value-head-dim": 8, "linear-conv-kernel-dim": 3 };
	const heads = { "linear-num-key-heads": 2, "linear-num-value-heads": 4, "attention-output-gate": true };
	const same = { keys: { ...sizes, ...heads }, pattern: "GE*-GG" };
	const reference = (await train(same))[0]!;
	for (const layout of [{ tensor: 2, expert: 2 }, { data: 2 }, { tensor: 2, pipeline: 2, pattern: "GE*|-GG" }]) {
		expectEqualTraining(await train({ ...same, ...layout }), reference);
	}
	const recomputed = { "recompute-granularity": "selective", "recompute-modules": ["core_attn", "layernorm"] };
	expectEqualTraining(await train({ ...same, keys: { ...same.keys, ...recomputed } }), reference);
}, 60_000);

test("routing that is forced to balance is the same on every layout", async () => {
	const forced = { keys: { "moe-router-force-load-balancing": true } };
	const reference = (await train(forced))[0]!;
	const own = (await train({}))[0]!;
	expect(reference.losses[0]!.balancing).not.toEqual(own.losses[0]!.balancing);
	for (const layout of [
		{ tensor: 2, data: 2, expert: 2 },
		{ pipeline: 2, pattern: "ME*|-MEM" },
	]) {
		expectEqualTraining(await train({ ...layout, ...forced }), reference);
	}
}, 60_000);

test("a balancing loss of all layers together", async () => {
	const keys = { "moe-router-load-balancing-type": ["pooled_aux_loss"], "moe-aux-loss-coeff": [0.1] };
	const same = { keys, pattern: "MEE*-E" };
	const reference = (await train(same))[0]!;
	const { balancing } = (await train({ pattern: same.pattern }))[0]!.losses[0]!;
	expect(Object.keys(reference.losses[0]!.balancing)).not.toEqual(Object.keys(balancing));
	for (const layout of [
		{ tensor: 2, expert: 2 },
		{ pipeline: 2, pattern: "ME|E*-E" },
		{ pipeline: 2, pattern: "ME|E*|-|E" },
		{ tensor: 2, pipeline: 2, pattern: "MEE*|-E" },
	]) {
		expectEqualTraining(await train({ ...same, ...layout }), reference);
	}
}, 60_000);

describe("a pipeline gives what one process gives", () => {
	/** The tests' layers, cut into segments: more than stages, uneven ones, empty ones. */
	const cuts = [
		{ pipeline: 2, pattern: "M|E|M*|-" },
		{ pipeline: 2, pattern: "|ME|M*-|" },
		{ pipeline: 2, pattern: "ME|M|*|-|" + "|" },
		{ pipeline: 3, pattern: "M|EM*|-" },
	];
	for (const tied of [false, true]) {
		test(tied ? "with tied embeddings" : "with embeddings of their own", async () => {
			const same = { tied, dropout: 0.2, pattern: "MEM*-" };
			const reference = (await train(same))[0]!;
			for (const cut of cuts) {
				const plain = await train({ ...same, ...cut });
				expectEqualTraining(plain, reference);
				if (cut !== cuts[0] && process.env.MIMO_TEST_FULL !== "1") continue;
				const sharded = await train({ ...same, ...cut, data: 2, zero: true });
				const whole = await train({ ...same, ...cut, data: 2 });
				expect(sharded.map(({ weights }) => weights)).toEqual(whole.map(({ weights }) => weights));
			}
		}, 60_000);
	}
});

test("dropout masks do not depend on the layout", async () => {
	const reference = (await train({ dropout: 0.2 }))[0]!;
	expectEqualTraining(await train({ tensor: 2, dropout: 0.2 }), reference);
	expectEqualTraining(await train({ data: 2, dropout: 0.2 }), reference);
});

test("with ZeRO-1 every rank ends with the very weights it has without", async () => {
	for (const layout of [
		{ data: 2, expert: 2 },
		{ tensor: 2, data: 2 },
	]) {
		const plain = await train(layout);
		const sharded = await train({ ...layout, zero: true });
		expect(sharded.map(({ weights }) => weights)).toEqual(plain.map(({ weights }) => weights));
	}
});

describe("selective recomputation changes no bit on two ranks", () => {
	const layout = { tensor: 2, expert: 2, dropout: 0.1 };
	let plain: RankResult[];
	beforeAll(async () => {
		plain = await train(layout);
	});
	const ofPattern = recomputeModuleNames.filter((module) => module !== "mla_up_proj");
	const cases = [...ofPattern.map((module) => [module]), recomputeModuleNames];
	for (const modules of cases) {
		test(modules.join(" "), async () => {
			const keys = { "recompute-granularity": "selective", "recompute-modules": modules };
			expect(await train({ ...layout, keys })).toEqual(plain);
		});
	}
	test("multi-latent attention", async () => {
		const latents = {
			...{ "hybrid-layer-pattern": "+-+E", "num-query-groups": 4, "q-lora-rank": 12, "kv-lora-rank": 10 },
			...{ "qk-head-dim": 6, "qk-pos-emb-head-dim": 4, "v-head-dim": 5, "qk-layernorm": true },
		};
		const kept = await train({ ...layout, keys: latents });
		for (const modules of [["mla_up_proj"], ["core_attn", "mla_up_proj", "layernorm"]]) {
			const keys = { ...latents, "recompute-granularity": "selective", "recompute-modules": modules };
			expect(await train({ ...layout, keys })).toEqual(kept);
		}
	});
});
