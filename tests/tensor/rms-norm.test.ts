import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { add } from "../../src/tensor/ops/add.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms, testDevice } from "../support.ts";
import { factorOf, ringMask, scaleMask } from "./ring-masks.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** RMSNorm in float64 over runs of `group` columns. */
function reference(x: Float64Array, weight: Float64Array, group: number, epsilon: number): Float64Array {
	const width = weight.length;
	return x.map((value, i) => {
		const begin = i - (i % group);
		const mean = x.subarray(begin, begin + group).reduce((sum, v) => sum + v * v, 0) / group;
		return (value / Math.sqrt(mean + epsilon)) * weight[i % width]!;
	});
}

describe("rmsNorm", () => {
	for (const [rows, width, group] of [
		[5, 24, 24],
		[130, 7, 7],
		[3, 32, 8],
		[0, 16, 16],
	] as const) {
		test(`[${rows}, ${width}] in groups of ${group}`, () => {
			checkGradients(device, {
				inputs: { x: { values: randomValues(rows * width, 1), shape: [rows, width] } },
				parameters: { weight: { values: randomValues(width, 2), shape: [width] } },
				forward: (tape, { x }, { weight }) => rmsNorm(tape, x!, weight!, 1e-5, { groupSize: group }),
				reference: ({ x, weight }) => reference(x!, weight!, group, 1e-5),
			});
		});
	}

	for (const [rows, width, group] of [
		[5, 24, 24],
		[130, 7, 7],
		[3, 32, 8],
	] as const) {
		test(`with a zero-centred weight, [${rows}, ${width}] in groups of ${group}`, () => {
			checkGradients(device, {
				inputs: { x: { values: randomValues(rows * width, 1), shape: [rows, width] } },
				parameters: { weight: { values: randomValues(width, 2), shape: [width] } },
				forward: (tape, { x }, { weight }) => rmsNorm(tape, x!, weight!, 1e-5, { groupSize: group, zeroCentred: true }),
				reference: ({ x, weight }) =>
					reference(
						x!,
						weight!.map((gamma) => 1 + gamma),
						group,
						1e-5,
					),
			});
		});
	}

	test("the gain of a bf16 zero-centred weight is not rounded", () => {
		using x = Tensor.from(device, Float32Array.of(1, 1), [1, 2]);
		using weight = new Parameter("w", Tensor.from(device, Float32Array.of(2 ** -12, 0), [2], { dtype: "bf16" }), null);
		using y = rmsNorm(new Tape(device, { recording: false }), x, weight, 0, { zeroCentred: true });
		expect([...y.toFloat32()]).toEqual([1 + 2 ** -12, 1]);
	});

	for (const [rows, width, group] of [
		[5, 24, 24],
		[66, 6, 6],
		[3, 32, 8],
	] as const) {
		test(`of masked columns, [${rows}, ${width}] in groups of ${group}, and scaled`, () => {
			const rings = Array.from({ length: width }, (_, column) => (column % 4) - 1);
			checkGradients(device, {
				inputs: {
					// A seed with which the gradient of s, a sum over values, does not cancel.
					x: { values: randomValues(rows * width, 8), shape: [rows, width] },
					m: { values: Float32Array.of(0.9, 0.4, 0.1), shape: [3] },
					s: { values: Float32Array.of(0.8), shape: [1] },
				},
				parameters: { weight: { values: randomValues(width, 2), shape: [width] } },
				forward: (tape, { x, m, s }, { weight }) => {
					const mask = { columns: ringMask(tape, m!, rings), scale: scaleMask(tape, s!, width) };
					return rmsNorm(tape, x!, weight!, 1e-2, { groupSize: group, mask });
				},
				reference: ({ x, m, s, weight }) => {
					const h = x!.map((value, at) => value * factorOf(rings, m!, at % width));
					return reference(h, weight!, group, 1e-2).map((value) => value * s![0]!);
				},
			});
		});
	}

	test("a scale alone, and columns alone, beside the gradient of a residual", () => {
		const [rows, width] = [6, 16];
		const rings = Array.from({ length: width }, (_, column) => (column < 9 ? 0 : 1));
		checkGradients(device, {
			inputs: {
				x: { values: randomValues(rows * width, 1), shape: [rows, width] },
				m: { values: Float32Array.of(0.9, 0.4), shape: [2] },
				s: { values: Float32Array.of(0.8), shape: [1] },
			},
			parameters: { weight: { values: randomValues(width, 2), shape: [width] } },
			forward: (tape, { x, m, s }, { weight }) => {
				const columns = { columns: ringMask(tape, m!, rings), scale: null };
				using first = rmsNorm(tape, x!, weight!, 1e-2, { mask: columns });
				const scale = { columns: null, scale: scaleMask(tape, s!, width) };
				using second = rmsNorm(tape, first, weight!, 1e-2, { mask: scale });
				return add(tape, first, second);
			},
			reference: ({ x, m, s, weight }) => {
				const h = x!.map((value, at) => value * factorOf(rings, m!, at % width));
				const first = reference(h, weight!, width, 1e-2);
				return reference(first, weight!, width, 1e-2).map((value, at) => value * s![0]! + first[at]!);
			},
		});
	});

	test("windows of wider tensors, in bf16, with a residual's gradient added inside", () => {
		const [rows, width, group, wide] = [6, 40, 20, 47];
		const narrow = (values: Float32Array, shape: number[]) => Tensor.from(device, values, shape, { dtype: "bf16" });
		using whole = narrow(randomValues(rows * wide, 1, 2), [rows, wide]);
		using window = whole.columns(5, width);
		using x = window.withGradient(new GradientSlot(device, window.shape, "bf16"));
		using weight = new Parameter("w", narrow(randomValues(width, 2), [width]), Tensor.zeros(device, [width]));
		const [values, gamma] = [x.toFloat32(), weight.value.toFloat32()].map((v) => Float64Array.from(v)) as [
			Float64Array,
			Float64Array,
		];
		const tape = new Tape(device, { recording: true });
		using y = rmsNorm(tape, x, weight, 1e-5, { groupSize: group });
		expect(relativeRms(y.toFloat32(), reference(values, gamma, group, 1e-5))).toBeLessThan(3e-3);
		using residual = narrow(randomValues(rows * width, 3), [rows, width]);
		using dy = narrow(randomValues(rows * width, 4), [rows, width]);
		x.gradient!.accumulate(residual.share());
		y.gradient!.accumulate(dy.share());
		tape.backward();
		using dx = x.gradient!.take()!;
		// The gradient of the norm in float64, by its formula.
		const [g, r] = [dy.toFloat32(), residual.toFloat32()];
		const dweight = new Float64Array(width);
		const expected = values.map((value, i) => {
			const begin = i - (i % group);
			const inverse =
				1 / Math.sqrt(values.subarray(begin, begin + group).reduce((a, v) => a + v * v, 0) / group + 1e-5);
			let dot = 0;
			for (let k = begin; k < begin + group; k++) dot += g[k]! * gamma[k % width]! * values[k]!;
			dweight[i % width]! += g[i]! * value * inverse;
			return r[i]! + inverse * (gamma[i % width]! * g[i]! - (value * inverse ** 2 * dot) / group);
		});
		expect(relativeRms(dx.toFloat32(), expected)).toBeLessThan(3e-3);
		expect(relativeRms(weight.mainGradient!.toFloat32(), dweight)).toBeLessThan(1e-6);
	});

	test("the sum with a residual is written and normalised", () => {
		const [rows, width] = [3, 17];
		using x = Tensor.from(device, randomValues(rows * width, 1), [rows, width]);
		using residual = Tensor.from(device, randomValues(rows * width, 2), [rows, width]);
		using weight = Tensor.from(device, randomValues(width, 3));
		using sum = Tensor.empty(device, x.shape);
		using y = Tensor.empty(device, x.shape);
		using rstd = Tensor.empty(device, [rows, 1]);
		device.run("rms_norm_forward", {
			...{ x, residual, weight, sum, y, rstd, rows, width, group_size: width, x_stride: width, y_stride: width },
			...{ epsilon: 1e-5, weight_offset: 0, dtype: x.dtypeCode, weight_dtype: weight.dtypeCode },
		});
		const total = x.toFloat32().map((value, i) => value + residual.toFloat32()[i]!);
		expect(sum.toFloat32()).toEqual(total);
		const expected = reference(Float64Array.from(total), Float64Array.from(weight.toFloat32()), width, 1e-5);
		expect(relativeRms(y.toFloat32(), expected)).toBeLessThan(1e-6);
	});
});
