import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { balancingLoss, type RouterOptions, route, updateExpertBias } from "../../src/tensor/ops/router.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDevices } from "./devices.ts";
import { type ReferenceOptions, referenceBalancingLoss, referenceRouting } from "./router-reference.ts";

let device: Device;
let single: Device;
openDevices((two, one) => {
	[device, single] = [two, one];
});

const inference = () => new Tape(device, { recording: false });

function withGradient(on: Device, values: Float32Array, shape: readonly number[]): Tensor {
	using plain = Tensor.from(on, values, shape);
	return plain.withGradient(new GradientSlot(on, shape, "f32"));
}

/** Routes values with the reference's options on the device. */
function routeLike(tape: Tape, logits: Tensor, options: ReferenceOptions, more: Partial<RouterOptions> = {}) {
	using bias = options.bias ? Tensor.from(tape.device, Float32Array.from(options.bias)) : null;
	const { bias: _, ...rest } = options;
	return route(tape, logits, { ...rest, expertBias: bias, ...more });
}

const bias12 = Float32Array.from(randomValues(12, 77, 0.8));
const cases: [string, number, ReferenceOptions][] = [
	["sigmoid", 8, { scoreFunction: "sigmoid", topk: 2 }],
	["sigmoid, scaled", 8, { scoreFunction: "sigmoid", topk: 3, scalingFactor: 2.5 }],
	["sigmoid, one of E, not normalised", 7, { scoreFunction: "sigmoid", topk: 1, scalingFactor: 2.5 }],
	["sigmoid, all of E", 5, { scoreFunction: "sigmoid", topk: 5 }],
	["sigmoid, bias", 12, { scoreFunction: "sigmoid", topk: 4, scalingFactor: 2.5, bias: bias12 }],
	[
		"sigmoid, bias, groups as Megatron scores them",
		12,
		{ scoreFunction: "sigmoid", topk: 6, bias: bias12, groups: { count: 4, topk: 2, scoreTopk: 3 } },
	],
	[
		"sigmoid, groups as Hugging Face scores them",
		12,
		{ scoreFunction: "sigmoid", topk: 3, groups: { count: 3, topk: 1, scoreTopk: 2 } },
	],
	["sigmoid, groups", 12, { scoreFunction: "sigmoid", topk: 4, groups: { count: 4, topk: 2, scoreTopk: 2 } }],
	...[4, 6].flatMap((topk) =>
		[false, true].map((preSoftmax): [string, number, ReferenceOptions] => [
			`softmax ${preSoftmax ? "before" : "after"} top-${topk}, groups`,
			12,
			{ scoreFunction: "softmax", topk, preSoftmax, groups: { count: 4, topk: 2, scoreTopk: topk / 2 } },
		]),
	),
	["softmax after top-k", 8, { scoreFunction: "softmax", topk: 3, scalingFactor: 1.5 }],
	["softmax before top-k", 8, { scoreFunction: "softmax", topk: 3, preSoftmax: true, scalingFactor: 1.5 }],
	["softmax before top-k, all of E", 6, { scoreFunction: "softmax", topk: 6, preSoftmax: true }],
	["softmax before top-k, one of E", 6, { scoreFunction: "softmax", topk: 1, preSoftmax: true }],
];

describe("route", () => {
	for (const [name, experts, options] of cases) {
		for (const tokens of [9, 35, 0]) {
			test(`${name}, ${tokens} tokens`, () => {
				const values = randomValues(tokens * experts, 5, 2);
				checkGradients(device, {
					inputs: { logits: { values, shape: [tokens, experts] } },
					forward: (tape, { logits }) => {
						using routing = routeLike(tape, logits!, options);
						const expected = referenceRouting(Float64Array.from(values), experts, options);
						expect([...routing.expertIndex.toInt32()]).toEqual(expected.index.flat());
						return routing.probabilities.share();
					},
					reference: ({ logits }) => referenceRouting(logits!, experts, options).probabilities,
				});
			});
		}
	}

	test("one expert after softmax has weight λ and no gradient", () => {
		using logits = withGradient(device, randomValues(5 * 4, 1), [5, 4]);
		const tape = new Tape(device, { recording: true });
		using routing = route(tape, logits, { scoreFunction: "softmax", topk: 1, scalingFactor: 2.5 });
		expect([...routing.probabilities.toFloat32()]).toEqual([2.5, 2.5, 2.5, 2.5, 2.5]);
		routing.probabilities.gradient!.accumulate(Tensor.from(device, randomValues(5, 2), [5, 1]));
		tape.backward();
		using gradient = logits.gradient!.take()!;
		expect(Math.max(...gradient.toFloat32().map(Math.abs))).toBeLessThan(1e-6);
	});

	test("ties go to the lower expert, those of saturated scores to the larger logit", () => {
		using logits = Tensor.from(device, Float32Array.from([1, 1, 1, 1, 0, 2, 2, 2, 40, 39, 40, 41]), [3, 4]);
		using routing = route(inference(), logits, { scoreFunction: "sigmoid", topk: 2 });
		expect([...routing.expertIndex.toInt32()]).toEqual([0, 1, 1, 2, 0, 3]);
		using equal = Tensor.zeros(device, [1, 12]);
		const groups = { count: 4, topk: 2, scoreTopk: 2 };
		using grouped = route(inference(), equal, { scoreFunction: "sigmoid", topk: 4, groups });
		expect([...grouped.expertIndex.toInt32()]).toEqual([0, 1, 2, 3]);
	});

	test("NaN logits select distinct experts and give NaN weights", () => {
		using logits = Tensor.from(device, new Float32Array(2 * 6).fill(Number.NaN), [2, 6]);
		for (const scoreFunction of ["sigmoid", "softmax"] as const) {
			using routing = route(inference(), logits, { scoreFunction, topk: 3 });
			expect([...routing.expertIndex.toInt32()]).toEqual([0, 1, 2, 0, 1, 2]);
			expect(routing.probabilities.toFloat32().every(Number.isNaN)).toBe(true);
		}
	});

	test("counts routed tokens once: added, padding left out, not when replaying", () => {
		const values = randomValues(6 * 4, 3);
		const expected = new Int32Array(4).fill(10);
		const { index } = referenceRouting(Float64Array.from(values), 4, { scoreFunction: "sigmoid", topk: 2 });
		for (const e of index.slice(0, 5).flat()) expected[e]!++;
		using logits = Tensor.from(device, values, [6, 4]);
		using tokensPerExpert = Tensor.from(device, new Int32Array(4).fill(10));
		using paddingMask = Tensor.from(device, Uint8Array.of(0, 0, 0, 0, 0, 1));
		const options = { scoreFunction: "sigmoid", topk: 2, tokensPerExpert, paddingMask } as const;
		for (const replaying of [false, true]) {
			using _routing = route(new Tape(device, { recording: false, replaying }), logits, options);
		}
		expect(tokensPerExpert.toInt32()).toEqual(expected);
	});

	test("refuses impossible selections", () => {
		using logits = Tensor.zeros(device, [1, 6]);
		const tryRoute = (options: Omit<RouterOptions, "scoreFunction">) => () =>
			route(inference(), logits, { scoreFunction: "sigmoid", ...options });
		expect(tryRoute({ topk: 7 })).toThrow("topk <= args.experts");
		expect(tryRoute({ topk: 1, groups: { count: 4, topk: 1, scoreTopk: 1 } })).toThrow("experts % args.expert_groups");
		expect(tryRoute({ topk: 3, groups: { count: 3, topk: 1, scoreTopk: 1 } })).toThrow("topk <= args.group_topk");
	});
});

describe("balancingLoss", () => {
	/** Gradient of Σ r p + Σ losses with respect to the logits, by central differences in float64. */
	function numericGradient(values: Float32Array, loss: (logits: Float64Array) => number): Float64Array {
		const x = Float64Array.from(values);
		return x.map((original, i) => {
			x[i] = original + 1e-5;
			const up = loss(x);
			x[i] = original - 1e-5;
			const down = loss(x);
			x[i] = original;
			return (up - down) / 2e-5;
		});
	}

	const experts = 12;
	const lengths = [5, 0, 9, 3];
	const tokens = 17;
	const padding = Uint8Array.from({ length: tokens }, (_, t) => Number(t % 5 === 2));
	for (const [name, , options] of cases.filter(([, e]) => e === 12 || e === 8)) {
		for (const padded of [false, true]) {
			test(`${name}${padded ? ", padding" : ""}: seq_aux_loss + aux_loss + z-loss, value and gradient`, () => {
				const values = randomValues(tokens * experts, 8, 2);
				const mask = padded ? padding : undefined;
				const r = randomValues(tokens * options.topk, 9);
				const [alpha, beta, zeta, scale] = [0.3, 0.2, 0.01, 1.7];
				const zLossOf = (logits: Float64Array) => {
					let sum = 0;
					for (let t = 0; t < tokens; t++) {
						if (mask?.[t]) continue;
						const row = logits.subarray(t * experts, (t + 1) * experts);
						sum += Math.log(row.reduce((total, l) => total + Math.exp(l), 0)) ** 2;
					}
					return sum;
				};
				const lossesOf = (logits: Float64Array) => {
					const routing = referenceRouting(logits, experts, options);
					const sequence = referenceBalancingLoss(routing, lengths, alpha, mask);
					return { routing, aux: sequence + referenceBalancingLoss(routing, [tokens], beta, mask) };
				};
				using logits = withGradient(device, values, [tokens, experts]);
				using sequences = Sequences.of(device, lengths);
				using paddingMask = mask ? Tensor.from(device, mask) : null;
				using loss = Tensor.zeros(device, [1]);
				using sum = Tensor.zeros(device, [1]);
				const tape = new Tape(device, { recording: true });
				using routing = routeLike(tape, logits, options, {
					paddingMask,
					statistics: sequences,
					zLoss: { sum, gradientScale: zeta },
				});
				balancingLoss(tape, routing.statistics!, { coefficient: alpha, gradientScale: scale, loss });
				using pooled = routing.statistics!.pooled();
				balancingLoss(tape, pooled, { coefficient: beta, gradientScale: scale, loss });
				const expected = Float64Array.from(values);
				expect(Math.abs(loss.item() / lossesOf(expected).aux - 1)).toBeLessThan(1e-6);
				expect(Math.abs(sum.item() / zLossOf(expected) - 1)).toBeLessThan(1e-6);

				routing.probabilities.gradient!.accumulate(Tensor.from(device, r, [tokens, options.topk]));
				tape.backward();
				using gradient = logits.gradient!.take()!;
				const numeric = numericGradient(values, (x) => {
					const { routing, aux } = lossesOf(x);
					const weighted = routing.probabilities.reduce((total, p, i) => total + p * r[i]!, 0);
					return weighted + scale * aux + zeta * zLossOf(x);
				});
				expect(relativeRms(gradient.toFloat32(), numeric)).toBeLessThan(2e-5);
			});
		}
	}

	test("is α for a balanced router, whatever the sequences; bias and groups do not enter", () => {
		const [E, T, alpha] = [8, 32, 1e-4];
		// Every token prefers another pair of experts, all pairs equally often.
		const values = Float32Array.from({ length: T * E }, (_, i) => {
			const [t, e] = [Math.floor(i / E), i % E];
			return e === t % E || e === (t + 1) % E ? 1 : -1;
		});
		using logits = Tensor.from(device, values, [T, E]);
		using bias = Tensor.from(device, randomValues(E, 4));
		for (const lengths of [[T], [8, 8, 16]]) {
			using sequences = Sequences.of(device, lengths);
			for (const scoreFunction of ["sigmoid", "softmax"] as const) {
				using routing = route(inference(), logits, {
					scoreFunction,
					topk: 2,
					expertBias: scoreFunction === "sigmoid" ? bias : null,
					groups: { count: 2, topk: 1, scoreTopk: 2 },
					statistics: sequences,
				});
				using loss = Tensor.zeros(device, [1]);
				balancingLoss(inference(), routing.statistics!, { coefficient: alpha, gradientScale: 1, loss });
				expect(Math.abs(loss.item() / alpha - 1)).toBeLessThan(1e-6);
				expect([...routing.statistics!.tokens.toFloat32()]).toEqual(lengths);
			}
		}
	});

	test("two ranks that sum their counts get the loss and the gradient of one", () => {
		const [E, T, topk] = [6, 20, 2];
		const values = randomValues(T * E, 12, 2);
		const run = (logits: Tensor, lengths: number[], exchange: (own: Tensor) => void, shards: number) => {
			using sequences = Sequences.of(device, lengths);
			const tape = new Tape(device, { recording: true });
			using routing = route(tape, logits, { scoreFunction: "sigmoid", topk, statistics: sequences });
			exchange(routing.statistics!.counts);
			using loss = Tensor.zeros(device, [1]);
			balancingLoss(tape, routing.statistics!, { coefficient: 0.1, gradientScale: 1, sequenceShards: shards, loss });
			routing.probabilities.gradient!.accumulate(Tensor.zeros(device, [logits.rows, topk]));
			tape.backward();
			using gradient = logits.gradient!.take()!;
			return { loss: loss.item(), gradient: gradient.toFloat32() };
		};
		using whole = withGradient(device, values, [T, E]);
		const counts = new Float32Array(E);
		const expected = run(whole, [T], (own) => counts.set(own.toFloat32()), 1);
		const halves = [0, 1].map((rank) => {
			using part = withGradient(device, values.slice((rank * T * E) / 2, ((rank + 1) * T * E) / 2), [T / 2, E]);
			return run(part, [T / 2], (own) => device.copyToDevice(own, counts), 2);
		});
		expect(halves[0]!.loss + halves[1]!.loss).toBeCloseTo(expected.loss, 7);
		expect(relativeRms([...halves[0]!.gradient, ...halves[1]!.gradient], expected.gradient)).toBeLessThan(1e-6);
	});

	test("a replaying tape has the gradient but does not report the losses again", () => {
		using logits = withGradient(device, randomValues(8 * 4, 6), [8, 4]);
		using sequences = Sequences.of(device, [8]);
		using loss = Tensor.zeros(device, [1]);
		using sum = Tensor.zeros(device, [1]);
		const tape = new Tape(device, { recording: true, replaying: true });
		using routing = route(tape, logits, {
			scoreFunction: "sigmoid",
			topk: 2,
			statistics: sequences,
			zLoss: { sum, gradientScale: 1 },
		});
		balancingLoss(tape, routing.statistics!, { coefficient: 1, gradientScale: 1, loss });
		expect([loss.item(), sum.item()]).toEqual([0, 0]);
		expect(routing.statistics!.dnormalised!.toFloat32().some((v) => v > 0)).toBe(true);
		tape.discard();
	});
});

test("1 and 2 threads route, count and differentiate alike, bit for bit", () => {
	const [T, E, K] = [500, 40, 6];
	const run = (on: Device) => {
		using logits = withGradient(on, randomValues(T * E, 21, 3), [T, E]);
		using sequences = Sequences.of(on, [130, 0, 370]);
		using loss = Tensor.zeros(on, [1]);
		using sum = Tensor.zeros(on, [1]);
		using tokensPerExpert = Tensor.zeros(on, [E], "i32");
		const tape = new Tape(on, { recording: true });
		using routing = routeLike(
			tape,
			logits,
			{ scoreFunction: "sigmoid", topk: K, bias: randomValues(E, 22) },
			{ statistics: sequences, tokensPerExpert, zLoss: { sum, gradientScale: 0.1 } },
		);
		balancingLoss(tape, routing.statistics!, { coefficient: 0.1, gradientScale: 1, loss });
		routing.probabilities.gradient!.accumulate(Tensor.from(on, randomValues(T * K, 23), [T, K]));
		const { statistics } = routing;
		const outputs = [routing.probabilities, statistics!.counts, statistics!.scoreSums, loss, sum];
		const values = outputs.map((tensor) => tensor.toFloat32());
		const integers = [routing.expertIndex.toInt32(), tokensPerExpert.toInt32()];
		tape.backward();
		using gradient = logits.gradient!.take()!;
		return [...values, gradient.toFloat32(), ...integers];
	};
	const before = [device, single].map((on) => on.memoryStatistics().liveBytes);
	expect(run(device)).toEqual(run(single));
	expect([device, single].map((on) => on.memoryStatistics().liveBytes)).toEqual(before);
});

test("updateExpertBias moves every bias by exactly ±rate or not at all, and clears the counts", () => {
	const rate = Math.fround(1e-3);
	using bias = Tensor.from(device, Float32Array.of(0.5, 0.5, 0.5, 0, -2));
	using counts = Tensor.from(device, Int32Array.of(3, 9, 6, 12, 0));
	updateExpertBias(device, bias, counts, rate);
	expect([...bias.toFloat32()]).toEqual([0.5 + rate, 0.5 - rate, 0.5, -rate, -2 + rate].map(Math.fround));
	expect([...counts.toInt32()]).toEqual([0, 0, 0, 0, 0]);
	// A mean that is not an integer: 1000000000 + 1 over 3, exact beyond fp32.
	using fine = Tensor.zeros(device, [3]);
	using large = Tensor.from(device, Int32Array.of(333333333, 333333334, 333333334));
	updateExpertBias(device, fine, large, rate);
	expect([...fine.toFloat32()]).toEqual([rate, -rate, -rate]);
});
