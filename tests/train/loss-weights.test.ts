/** Without --calculate-per-token-loss a step's gradient is the mean of those of its microbatches, each of its own token mean. */
import { afterAll, expect, test } from "bun:test";
import { copyBlocks } from "../../src/checkpoint/model-store.ts";
import { lossTokens } from "../../src/data/microbatch.ts";
import { languageAlone, namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { openEngine } from "../../src/parity/verify/engine.ts";
import { languageSamples, planOf } from "../../src/parity/verify/samples.ts";
import type { Subject } from "../../src/parity/verify/subject.ts";
import { LossWeights } from "../../src/train/loss-weights.ts";
import type { StepResult } from "../../src/train/step-state.ts";
import { elasticKeys } from "../parity/verify/elastic-keys.ts";
import { smallSubject } from "../parity/verify/subject.ts";
import { testDevice } from "../support.ts";

const device = await testDevice();
afterAll(() => device[Symbol.dispose]());

const microBatchSize = 2;
const planFor = ({ samples, encoders, sequenceLength }: Subject) => {
	const layout = encoders.length === 0 ? languageAlone : parseLayout("1");
	return planOf(namedTopology(layout), { samples: samples.length, microBatchSize, sequenceLength });
};

/** A step of new weights, and every gradient by name. */
async function trained(subject: Subject): Promise<{ result: StepResult; gradients: Map<string, Float32Array> }> {
	using engine = await openEngine(World.alone(device), planFor(subject), subject);
	engine.restart();
	const gradients = new Map<string, Float32Array>();
	const result = engine.step(() => {
		for (const { name, shape, value, gradient, blocks } of engine.tensors()) {
			if (gradient) {
				const full = new Float32Array(shape.reduce((product, size) => product * size, 1));
				copyBlocks(gradient.toFloat32(), gradient.width, full, full.length / shape[0]!, blocks, "to full");
				gradients.set(name, full);
				gradient[Symbol.dispose]();
			}
			value[Symbol.dispose]();
		}
	});
	return { result, gradients };
}

/** Router losses weigh a microbatch by all its tokens, loss tokens or not; the references of tests/parity have them. */
const common = { "calculate-per-token-loss": false, "moe-router-load-balancing-type": ["none"], "clip-grad": 0 };

for (const [name, keys] of [
	["images and repeated MTP depths", { "hybrid-layer-pattern": "ME*-/*E/*E", "mtp-use-repeated-layer": true }],
	[
		"an elastic model that is its own teacher",
		{
			...elasticKeys,
			"llm-only": true,
			"self-distillation": true,
			"export-kd-alpha": 0.5,
			"override-selected-budget": null,
		},
	],
] as const) {
	test(name, async () => {
		const drawn = smallSubject({ ...common, ...keys });
		// The second microbatch has no loss token, and counts.
		const samples = drawn.samples.map(({ text, features }, index) => {
			const silent = Math.floor(index / microBatchSize) === 1;
			return { features, text: silent ? { ...text, lossMask: new Float32Array(text.lossMask.length) } : text };
		});
		const subject = { ...drawn, samples };
		const [whole, ofTokens] = [await trained(subject), await trained({ ...subject, lossMean: "tokens" })];
		const plan = planFor(subject);
		const alone: Awaited<ReturnType<typeof trained>>[] = [];
		for (let m = 0; m < plan.microbatches; m++) {
			alone.push(await trained({ ...subject, lossMean: "tokens", samples: languageSamples(plan, samples, 0, m) }));
		}
		const counts = alone.map(({ result }) => result.tokens);
		expect([...new Set(counts)].length).toBeGreaterThan(2);
		expect(counts[1]).toBe(0);
		let apart = 0;
		for (const [tensor, gradient] of whole.gradients) {
			const mean = gradient.map(
				(_, i) => alone.reduce((sum, { gradients }) => sum + gradients.get(tensor)![i]!, 0) / alone.length,
			);
			const size = Math.hypot(...mean);
			const off = (other: Float32Array) => Math.hypot(...other.map((value, i) => value - mean[i]!));
			// The terms of mixer.D's gradient nearly cancel, so its rounding is that of larger numbers.
			const limit = 2e-5 * size + 1e-7 * whole.result.gradientNorm;
			expect({ tensor, agrees: off(gradient) <= limit }).toEqual({ tensor, agrees: true });
			apart = Math.max(apart, off(ofTokens.gradients.get(tensor)!) / size);
		}
		expect(whole.gradients.size).toBeGreaterThan(40);
		expect(apart).toBeGreaterThan(0.1);
		// Megatron logs the mean of tokens in both modes.
		expect(whole.result.losses).toEqual(ofTokens.result.losses);
		const total = alone.reduce((sum, { result }) => sum + result.loss * result.tokens, 0);
		expect(whole.result.loss).toBeCloseTo(total / whole.result.tokens, 5);
	}, 60_000);
}

test("weights of a microbatch, and the factor that is applied last", () => {
	const text = { ids: new Int32Array(8), lossMask: Float32Array.of(1, 0, 0, 1, 1, 0, 0, 0) };
	const silent = { ...text, lossMask: new Float32Array(8) };
	const step = { microbatches: 4, lanes: 2 };
	const [tokens, means] = [new LossWeights("tokens", step), new LossWeights("microbatches", step)];
	expect(lossTokens(text)).toBe(3);
	expect([tokens.of(text), tokens.of(silent)]).toEqual([
		{ loss: 3, routers: 8 },
		{ loss: 0, routers: 8 },
	]);
	expect([means.of(text), means.of(silent)]).toEqual([
		{ loss: 0.25, routers: 0.25 },
		{ loss: 0, routers: 0.25 },
	]);
	expect([tokens.scale(16), tokens.scale(0), means.scale(16)]).toEqual([1 / 16, 1, 1 / 2]);
});
