/** Experts against PyTorch in float64 and transformers' Qwen3-MoE (tests/golden/tools/make_experts.py). */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { add } from "../../src/tensor/ops/add.ts";
import { groupedMlp } from "../../src/tensor/ops/grouped-mlp.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { ExpertOrder, permute, unpermute } from "../../src/tensor/ops/permute.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import { route } from "../../src/tensor/ops/router.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";
import { type ExpertShape, isGlu, offsetsOf } from "./expert-reference.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const golden = (name: string) =>
	JSON.parse(readFileSync(join(import.meta.dir, "../golden/experts", name), "utf8")) as never;

interface Case extends Omit<ExpertShape, "clamp"> {
	readonly seed: number;
	readonly clamp: number | null;
	readonly biases: boolean;
	/** For every tensor the sum of its values times random numbers, and the sum of its squares. */
	readonly found: Readonly<Record<string, readonly [projection: number, squares: number]>>;
}

const count = (shape: readonly number[]) => shape.reduce((product, size) => product * size, 1);

/** Largest difference of a tensor's two sums from the reference's, relative to their size. */
function difference(values: Float32Array, seed: number, [projection, squares]: readonly [number, number]): number {
	const random = randomValues(values.length, seed);
	const own = values.reduce((sum, value, i) => sum + value * random[i]!, 0);
	const size = values.reduce((sum, value) => sum + value * value, 0);
	// A sum of n random terms is about as large as their root of squares.
	const scale = Math.max(Math.sqrt(squares), 1e-20);
	return Math.max(Math.abs(own - projection) / scale, Math.abs(size - squares) / Math.max(squares, 1e-20));
}

describe("200 random layers of experts are PyTorch's", () => {
	const cases: readonly Case[] = golden("cases.json");
	test("all kinds are among them", () => {
		expect(cases).toHaveLength(200);
		for (const has of [
			({ loads }: Case) => loads.includes(0),
			({ biases, interleave }: Case) => biases && interleave! > 0,
			({ clamp, activation }: Case) => clamp === 0.5 && activation === "swiglu",
			({ clamp, linearOffset }: Case) => clamp === 7 && linearOffset === 1,
			({ activation }: Case) => activation === "squaredRelu",
		]) {
			expect(cases.filter(has).length).toBeGreaterThan(5);
		}
	});

	test("outputs and gradients", () => {
		const worst: Record<string, number> = {};
		for (const { seed, loads, hidden, width, activation, clamp, linearOffset, interleave, biases, found } of cases) {
			const rows = loads.reduce((sum, load) => sum + load, 0);
			const zWidth = isGlu(activation) ? 2 * width : width;
			const shapes = {
				x: [[rows, hidden], 1],
				p: [[rows], 1],
				w1: [[loads.length, zWidth, hidden], 1 / Math.sqrt(hidden)],
				w2: [[loads.length, hidden, width], 1 / Math.sqrt(width)],
				b1: [[loads.length, zWidth], 0.5],
				b2: [[loads.length, hidden], 0.5],
			} as const;
			const names = Object.keys(shapes) as (keyof typeof shapes)[];
			const values = (name: keyof typeof shapes) => {
				const [shape, scale] = shapes[name];
				return Tensor.from(device, randomValues(count(shape), seed + names.indexOf(name), scale), shape);
			};
			const parameter = (name: keyof typeof shapes) =>
				new Parameter(name, values(name), Tensor.zeros(device, shapes[name][0]));
			using fc1 = parameter("w1");
			using fc2 = parameter("w2");
			using fc1Bias = biases ? parameter("b1") : null;
			using fc2Bias = biases ? parameter("b2") : null;
			using plainX = values("x");
			using plainP = values("p");
			using x = plainX.withGradient(new GradientSlot(device, plainX.shape, "f32"));
			using p = plainP.withGradient(new GradientSlot(device, plainP.shape, "f32"));
			using offsets = Tensor.from(device, offsetsOf(loads));
			const tape = new Tape(device, { recording: true });
			const options = { activation, interleave: interleave!, linearOffset: linearOffset!, ...(clamp && { clamp }) };
			const sorted = { rows: x, rowProbability: p, offsets };
			using y = groupedMlp(tape, sorted, { fc1, fc2, fc1Bias, fc2Bias }, options);
			const output = y.toFloat32();
			y.gradient!.accumulate(Tensor.from(device, randomValues(output.length, seed + 10), y.shape));
			tape.backward();
			using dx = x.gradient!.take()!;
			using dp = p.gradient!.take()!;
			const results = { y: output, dx: dx.toFloat32(), dp: dp.toFloat32() } as Record<string, Float32Array>;
			for (const one of [fc1, fc2, fc1Bias, fc2Bias]) {
				if (one) results[`d${one.name}`] = one.mainGradient!.toFloat32();
			}
			expect(Object.keys(results).toSorted()).toEqual(Object.keys(found).toSorted());
			for (const [name, tensor] of Object.entries(results)) {
				const at = name === "y" ? 20 : 21 + names.indexOf(name.slice(1) as "x");
				const off = difference(tensor, seed + at, found[name]!);
				worst[name] = Math.max(worst[name] ?? 0, off);
				expect([seed, name, off < 1e-5]).toEqual([seed, name, true]);
			}
		}
		expect(Object.keys(worst).length).toBe(7);
	});
});

test("a layer of gated experts is transformers' Qwen3-MoE", () => {
	const reference: {
		readonly seeds: Readonly<Record<"norm" | "router" | "fc1" | "fc2" | "x" | "dy", number>>;
		readonly tokens: number;
		readonly epsilon: number;
		readonly y: readonly number[];
		readonly gradients: Readonly<Record<string, readonly number[]>>;
	} = golden("qwen3-moe.json");
	const { seeds, tokens } = reference;
	const drawn = (name: keyof typeof seeds, shape: number[], scale: number) =>
		Tensor.from(device, randomValues(count(shape), seeds[name], scale), shape);
	const parameter = (name: "router" | "fc1" | "fc2", shape: number[], scale: number) =>
		new Parameter(name, drawn(name, shape, scale), Tensor.zeros(device, shape));
	const ones = randomValues(16, seeds.norm, 0.2).map((value) => 1 + value);
	using norm = new Parameter("norm", Tensor.from(device, ones), Tensor.zeros(device, [16]));
	using router = parameter("router", [6, 16], 0.5);
	using fc1 = parameter("fc1", [6, 24, 16], 0.3);
	using fc2 = parameter("fc2", [6, 16, 12], 0.3);
	using plain = drawn("x", [tokens, 16], 1);
	using x = plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
	const tape = new Tape(device, { recording: true });
	using u = rmsNorm(tape, x, norm, reference.epsilon);
	using logits = linear(tape, u, router);
	using routing = route(tape, logits, { topk: 2, scoreFunction: "softmax" });
	using order = ExpertOrder.of(device, routing.expertIndex, 6);
	const permuted = permute(tape, u, routing.probabilities, order);
	using rows = permuted.rows;
	using rowProbability = permuted.rowProbability;
	const weights = { fc1, fc2, fc1Bias: null, fc2Bias: null };
	const sorted = { rows, rowProbability, offsets: order.offsets };
	using outputs = groupedMlp(tape, sorted, weights, { activation: "swiglu" });
	using mixed = unpermute(tape, outputs, order);
	using y = add(tape, x, mixed);
	expect(relativeRms(y.toFloat32(), reference.y)).toBeLessThan(1e-6);
	y.gradient!.accumulate(drawn("dy", [tokens, 16], 1));
	tape.backward();
	using dx = x.gradient!.take()!;
	expect(relativeRms(dx.toFloat32(), reference.gradients.x!)).toBeLessThan(2e-6);
	for (const { name, mainGradient } of [norm, router, fc1, fc2]) {
		expect(relativeRms(mainGradient!.toFloat32(), reference.gradients[name]!)).toBeLessThan(5e-6);
	}
});
