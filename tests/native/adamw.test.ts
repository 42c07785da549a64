import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Dtype } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import type { Moments } from "../../src/optim/adamw.ts";
import { roundToBf16, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const f32 = Math.fround;
const beta1 = f32(0.9);
const beta2 = f32(0.95);
const epsilon = f32(1e-8);

const fp32: Moments = { expAvg: "f32", expAvgSq: "f32" };

/** An optimizer over `elements` numbers: its tensors by name. */
function state(elements: number, modelDtype: "f32" | "bf16" | null, moments: Moments = fp32) {
	const scalar = (value: number) => Tensor.from(device, Float32Array.of(value));
	return {
		master: Tensor.from(device, randomValues(elements, 1)),
		model: modelDtype && Tensor.zeros(device, [elements], modelDtype),
		gradient: Tensor.from(device, randomValues(elements, 2, 3)),
		exp_avg: Tensor.zeros(device, [elements], moments.expAvg),
		exp_avg_sq: Tensor.zeros(device, [elements], moments.expAvgSq),
		learning_rate: scalar(1e-2),
		weight_decay: scalar(0.1),
		clip_factor: scalar(0.25),
		bias_correction1: scalar(0),
		bias_correction2: scalar(0),
		found_inf: scalar(0),
		step: Tensor.from(device, Int32Array.of(0)),
	};
}
type State = ReturnType<typeof state>;

function dispose(s: State): void {
	for (const tensor of Object.values(s)) tensor?.[Symbol.dispose]();
}

function stepOf(s: State, options: { decay?: number; rate?: number } = {}): void {
	const { step, bias_correction1, bias_correction2, found_inf, ...rest } = s;
	device.run("adam_advance", { step, bias_correction1, bias_correction2, found_inf, beta1, beta2 });
	device.run("adamw", {
		...rest,
		bias_correction1,
		bias_correction2,
		found_inf,
		elements: s.master.elements,
		beta1,
		beta2,
		epsilon,
		weight_decay_multiplier: options.decay ?? 1,
		learning_rate_multiplier: options.rate ?? 1,
		model_dtype: s.model?.dtypeCode ?? 0,
		exp_avg_dtype: s.exp_avg.dtypeCode,
		exp_avg_sq_dtype: s.exp_avg_sq.dtypeCode,
	});
}

/** AdamW in float64 with the device's fp32 constants. */
function reference(steps: number, elements: number, decay: number, rate: number) {
	const p = Float64Array.from(randomValues(elements, 1));
	const g = Float64Array.from(randomValues(elements, 2, 3), (value) => value * 0.25);
	const m = new Float64Array(elements);
	const v = new Float64Array(elements);
	for (let t = 1; t <= steps; t++) {
		const [c1, c2] = [1 - beta1 ** t, 1 - beta2 ** t];
		for (let i = 0; i < elements; i++) {
			m[i] = beta1 * m[i]! + (1 - beta1) * g[i]!;
			v[i] = beta2 * v[i]! + (1 - beta2) * g[i]! ** 2;
			const u = m[i]! / c1 / (Math.sqrt(v[i]! / c2) + epsilon) + f32(0.1) * decay * p[i]!;
			p[i]! -= f32(1e-2) * rate * u;
		}
	}
	return { p, m, v };
}

describe("adamw", () => {
	for (const [elements, decay, rate] of [
		[1, 1, 1],
		[1001, 1, 1],
		[20000, 0, 0.5],
	] as const) {
		test(`${elements} elements, decay × ${decay}, rate × ${rate}, against float64`, () => {
			const s = state(elements, "f32");
			for (let i = 0; i < 5; i++) stepOf(s, { decay, rate });
			const expected = reference(5, elements, decay, rate);
			expect(relativeRms(s.master.toFloat32(), expected.p)).toBeLessThan(2e-7);
			expect(relativeRms(s.exp_avg.toFloat32(), expected.m)).toBeLessThan(3e-7);
			expect(relativeRms(s.exp_avg_sq.toFloat32(), expected.v)).toBeLessThan(3e-7);
			expect(s.model!.toFloat32()).toEqual(s.master.toFloat32());
			expect(s.step.item()).toBe(5);
			dispose(s);
		});
	}

	test("weight decay is decoupled: without a gradient it shrinks weights and leaves the moments at zero", () => {
		const s = state(100, null);
		const before = s.master.toFloat32();
		device.setZero(s.gradient, s.gradient.bytes);
		stepOf(s);
		expect(
			relativeRms(
				s.master.toFloat32(),
				before.map((p) => p * (1 - 1e-3)),
			),
		).toBeLessThan(1e-7);
		expect(s.exp_avg.toFloat32().every((m) => m === 0)).toBe(true);
		expect(s.exp_avg_sq.toFloat32().every((v) => v === 0)).toBe(true);
		dispose(s);
	});

	for (const moments of [
		{ expAvg: "bf16", expAvgSq: "bf16" },
		{ expAvg: "f32", expAvgSq: "bf16" },
	] as const) {
		test(`moments in ${moments.expAvg} and ${moments.expAvgSq} are those of fp32, rounded to nearest even where they are stored`, () => {
			const elements = 4099;
			const [exact, stored] = [state(elements, null), state(elements, null, moments)];
			for (let i = 0; i < 3; i++) {
				stepOf(exact);
				stepOf(stored);
				// The update has the moments before they are rounded, so one step from the same state gives the same weights; a GPU
				// fuses other products with sums in each of its kernels, which moves last bits.
				const limit = device.library.kind === "cpu" ? 0 : 1e-7;
				expect(relativeRms(stored.master.toFloat32(), exact.master.toFloat32())).toBeLessThanOrEqual(limit);
				device.copyToDevice(exact.master, stored.master.toFloat32());
				for (const name of ["exp_avg", "exp_avg_sq"] as const) {
					const values = exact[name].toFloat32();
					if (stored[name].dtype === "f32") {
						expect(relativeRms(stored[name].toFloat32(), values)).toBeLessThanOrEqual(limit);
						device.copyToDevice(exact[name], stored[name].toFloat32());
						continue;
					}
					const bits = new Uint16Array(elements);
					device.copyToHost(bits, stored[name]);
					const steps = roundToBf16(values).map((rounded, at) => Math.abs(rounded - bits[at]!));
					expect(Math.max(...steps)).toBeLessThanOrEqual(limit === 0 ? 0 : 1);
					expect(steps.filter((step) => step > 0).length).toBeLessThanOrEqual(limit === 0 ? 0 : 4);
					device.copyToDevice(exact[name], stored[name].toFloat32());
				}
			}
			dispose(exact);
			dispose(stored);
		});
	}

	test("the bf16 copy is the master rounded to nearest even", () => {
		const s = state(4097, "bf16");
		stepOf(s);
		const copy = new Uint16Array(4097);
		device.copyToHost(copy, s.model!);
		expect([...copy]).toEqual([...roundToBf16(s.master.toFloat32())]);
		dispose(s);
	});

	test("found_inf leaves everything untouched, the step too", () => {
		const s = state(300, "bf16");
		stepOf(s);
		const watched = (["master", "model", "exp_avg", "exp_avg_sq", "bias_correction1", "bias_correction2"] as const).map(
			(name) => s[name]!,
		);
		const before = watched.map((tensor) => tensor.toFloat32());
		device.run("fill", { y: s.found_inf, elements: 1, value: 1, dtype: s.found_inf.dtypeCode });
		stepOf(s);
		expect(watched.map((tensor) => tensor.toFloat32())).toEqual(before);
		expect(s.step.item()).toBe(1);
		dispose(s);
	});

	test("a step over two slices equals one over the whole", () => {
		const whole = state(999, "f32");
		stepOf(whole);
		const cut = state(999, "f32");
		const { step, bias_correction1, bias_correction2, found_inf, ...rest } = cut;
		device.run("adam_advance", { step, bias_correction1, bias_correction2, found_inf, beta1, beta2 });
		for (const [begin, count] of [
			[0, 333],
			[333, 666],
		] as const) {
			const names = ["master", "model", "gradient", "exp_avg", "exp_avg_sq"] as const;
			const slices = names.map((name) => cut[name]!.columns(begin, count));
			const [master, model, gradient, exp_avg, exp_avg_sq] = slices as [Tensor, Tensor, Tensor, Tensor, Tensor];
			device.run("adamw", {
				...rest,
				...{ master, model, gradient, exp_avg, exp_avg_sq, bias_correction1, bias_correction2, found_inf },
				...{ elements: count, beta1, beta2, epsilon, weight_decay_multiplier: 1, learning_rate_multiplier: 1 },
				model_dtype: model.dtypeCode,
				exp_avg_dtype: Dtype.f32,
				exp_avg_sq_dtype: Dtype.f32,
			});
			for (const slice of slices) slice[Symbol.dispose]();
		}
		expect(cut.master.toFloat32()).toEqual(whole.master.toFloat32());
		dispose(whole);
		dispose(cut);
	});
});

describe("clip_factor", () => {
	const clip = (sumOfSquares: number, maxNorm: number) => {
		using sum = Tensor.from(device, Float64Array.of(sumOfSquares));
		using norm = Tensor.zeros(device, [1]);
		using factor = Tensor.zeros(device, [1]);
		using found = Tensor.zeros(device, [1]);
		device.run("clip_factor", {
			sum_of_squares: sum,
			norm,
			clip_factor: factor,
			found_inf: found,
			max_norm: maxNorm,
		});
		return [norm.item(), factor.item(), found.item()];
	};

	test("shrinks large norms alone", () => {
		expect(clip(16, 1)).toEqual([4, f32(1 / (4 + 1e-6)), 0]);
		expect(clip(0.25, 1)).toEqual([0.5, 1, 0]);
		expect(clip(16, 0)).toEqual([4, 1, 0]);
		expect(clip(0, 1)).toEqual([0, 1, 0]);
	});

	test("reports a norm that is not finite", () => {
		expect(clip(Number.NaN, 1)).toEqual([Number.NaN, 1, 1]);
		expect(clip(Number.POSITIVE_INFINITY, 1)).toEqual([Number.POSITIVE_INFINITY, 0, 1]);
	});
});
