/** Routing for benchmarks: even, independent of the router, and with gradients that still reach it. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { testDevice } from "../support.ts";
import { batch, Training, tiny } from "./training.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const forced = { "moe-router-force-load-balancing": true, "moe-router-enable-expert-bias": true };
const open = (keys: Record<string, unknown> = {}) =>
	Training.open(tiny({ "hybrid-layer-pattern": "M*E", ...forced, ...keys }), device);

/** The experts of every token of a step, microbatch after microbatch. */
function choices(training: Training, iteration: number, microbatches = 2): number[] {
	const router = training.run.language!.routers.get(2)!;
	const chosen: number[] = [];
	router.onRouting = (experts) => chosen.push(...experts.toInt32());
	training.step(batch(microbatches, 5), iteration);
	router.onRouting = null;
	return chosen;
}

test("experts get about equally many tokens, others in every step and microbatch, whatever the router holds", async () => {
	using training = await open();
	using other = await open();
	const weight = [...other.run.language!.parameters].find(({ name }) => name.endsWith("mlp.router.weight"))!;
	device.setZero(weight.value, weight.value.bytes);
	const first = choices(training, 0, 40);
	expect(choices(other, 0, 40)).toEqual(first);
	const counts = new Array<number>(8).fill(0);
	for (const expert of first) counts[expert]!++;
	// 40 microbatches of 48 tokens with 2 experts each: 480 a piece; the standard deviation is about 19.
	for (const count of counts) expect(Math.abs(count / 480 - 1)).toBeLessThan(0.2);
	const perMicrobatch = first.length / 40;
	expect(first.slice(0, perMicrobatch)).not.toEqual(first.slice(perMicrobatch, 2 * perMicrobatch));
	expect(choices(training, 1, 40)).not.toEqual(first);
});

test("the router gets a gradient, and the expert bias rests", async () => {
	using training = await open();
	training.step(batch(2));
	const { parameters, routers } = training.run.language!;
	const weight = [...parameters].find(({ name }) => name.endsWith("mlp.router.weight"))!;
	expect(weight.mainGradient!.toFloat32().some((value) => value !== 0)).toBeTrue();
	const { expertBias, stepTokens } = routers.get(2)!;
	expect(expertBias.toFloat32().every((value) => value === 0)).toBeTrue();
	expect(stepTokens.toInt32().reduce((sum, tokens) => sum + tokens, 0)).toBe(2 * 48 * 2);
});

test("a bias that the model has does not decide", async () => {
	using plain = await open();
	using biased = await open();
	const { expertBias } = biased.run.language!.routers.get(2)!;
	device.copyToDevice(expertBias, Float32Array.of(9, 9, 0, 0, 0, 0, 0, 0));
	expect(choices(biased, 0)).toEqual(choices(plain, 0));
});

test("layers that are recomputed draw the same", async () => {
	const run = async (keys: Record<string, unknown>) => {
		using training = await open(keys);
		training.run.state.optimizer.refreshMasters();
		return { result: training.step(batch(2)), weights: training.weights() };
	};
	const plain = await run({});
	expect(await run({ "recompute-granularity": "full" })).toEqual(plain);
	expect(await run({ "recompute-granularity": "selective", "recompute-modules": ["moe"] })).toEqual(plain);
});
