import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { activation } from "../../src/tensor/ops/activation.ts";
import { addBias } from "../../src/tensor/ops/grouped-bias.ts";
import { groupedLinear } from "../../src/tensor/ops/grouped-linear.ts";
import { type GroupedMlpOptions, groupedMlp } from "../../src/tensor/ops/grouped-mlp.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { recompute } from "../../src/tensor/recompute.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDevices } from "./devices.ts";
import { type ExpertShape, expertReference, isGlu, offsetsOf } from "./expert-reference.ts";

let device: Device;
let single: Device;
openDevices((two, one) => {
	[device, single] = [two, one];
});

const activations: readonly GroupedMlpOptions[] = [
	{ activation: "squaredRelu" },
	{ activation: "swiglu" },
	{ activation: "swiglu", clamp: 0.8 },
	{ activation: "quickGeglu" },
	{ activation: "quickGeglu", clamp: 0.8, linearOffset: 1 },
];

interface Operands {
	readonly x: Float32Array;
	readonly p: Float32Array;
	readonly w1: Float32Array;
	readonly w2: Float32Array;
	readonly b1: Float32Array;
	readonly b2: Float32Array;
}

function shapesOf({ loads, hidden, width, activation }: ExpertShape, rows?: number) {
	const zWidth = isGlu(activation as never) ? 2 * width : width;
	const total = rows ?? loads.reduce((sum, load) => sum + load, 0);
	const experts = loads.length;
	return {
		x: [total, hidden],
		p: [total],
		w1: [experts, zWidth, hidden],
		w2: [experts, hidden, width],
		b1: [experts, zWidth],
		b2: [experts, hidden],
	} as const;
}

const count = (shape: readonly number[]) => shape.reduce((product, size) => product * size, 1);

function operandsOf(shape: ExpertShape, seed: number, rows?: number): Operands {
	const shapes = shapesOf(shape, rows);
	const scales = { x: 1, p: 1, w1: 1, w2: 1, b1: 0.5, b2: 0.5 };
	return Object.fromEntries(
		Object.entries(shapes).map(([name, own], index) => [
			name,
			randomValues(count(own), seed * 10 + index, scales[name as keyof typeof scales]),
		]),
	) as unknown as Operands;
}

describe("groupedMlp", () => {
	for (const options of activations) {
		for (const biases of [false, true]) {
			for (const interleave of isGlu(options.activation as never) ? [0, 3] : [0]) {
				for (const loads of [
					[3, 1, 5],
					[0, 4, 0],
					[0, 0],
				]) {
					const words = [
						JSON.stringify(options),
						biases && "biases",
						interleave > 0 && "interleaved",
						`[${loads}] rows`,
					];
					test(`output and every gradient, ${words.filter(Boolean).join(", ")}`, () => {
						const shape = { loads, hidden: 5, width: 6, ...options, interleave } as ExpertShape;
						const shapes = shapesOf(shape);
						const values = operandsOf(shape, 1);
						const given = (name: keyof Operands) => ({ values: values[name], shape: shapes[name] });
						using offsets = Tensor.from(device, offsetsOf(loads));
						checkGradients(device, {
							inputs: { x: given("x"), p: given("p") },
							parameters: {
								w1: given("w1"),
								w2: given("w2"),
								...(biases && { b1: given("b1"), b2: given("b2") }),
							},
							forward: (tape, { x, p }, { w1, w2, b1, b2 }) =>
								groupedMlp(
									tape,
									{ rows: x!, rowProbability: p!, offsets },
									{ fc1: w1!, fc2: w2!, fc1Bias: b1 ?? null, fc2Bias: b2 ?? null },
									{ ...options, interleave },
								),
							reference: (all) => expertReference(shape, all as never),
						});
					});
				}
			}
		}
	}

	interface Setting {
		readonly on?: Device;
		readonly dtype?: "f32" | "bf16";
		readonly options?: GroupedMlpOptions;
		readonly loads?: readonly number[];
		readonly biases?: boolean;
		/** How forward and backward run. */
		readonly way?: "one operation" | "one after the other" | "late" | "recomputed";
	}

	/** Rows of experts with NaN behind them: output and every gradient. */
	function run(setting: Setting = {}) {
		const { on = device, dtype = "f32", loads = [70, 0, 3, 130], biases = true, way = "one operation" } = setting;
		const options = setting.options ?? { activation: "swiglu", clamp: 2, interleave: 8 };
		const before = on.memoryStatistics().liveBytes;
		const shape = { loads, hidden: 24, width: 40, ...options } as ExpertShape;
		const live = loads.reduce((sum, load) => sum + load, 0);
		const rows = live + 7;
		const shapes = shapesOf(shape, rows);
		const values = operandsOf(shape, 2, rows);
		values.x.fill(Number.NaN, live * shape.hidden);
		values.p.fill(Number.NaN, live);
		const ready: string[] = [];
		const weight = (name: keyof Operands) =>
			new Parameter(
				name,
				Tensor.from(on, values[name], shapes[name], { dtype }),
				Tensor.from(on, new Float32Array(count(shapes[name])).fill(1), shapes[name]),
			);
		const parameters = [weight("w1"), weight("w2"), ...(biases ? [weight("b1"), weight("b2")] : [])];
		const [fc1, fc2, fc1Bias = null, fc2Bias = null] = parameters as [Parameter, Parameter, Parameter?, Parameter?];
		const offsets = Tensor.from(on, offsetsOf(loads));
		const plainX = Tensor.from(on, values.x, shapes.x, { dtype });
		const plainP = Tensor.from(on, values.p, shapes.p);
		const x = plainX.withGradient(new GradientSlot(on, shapes.x, dtype));
		const p = plainP.withGradient(new GradientSlot(on, shapes.p, "f32"));
		const tape = new Tape(on, { recording: true, onGradient: ({ name }) => ready.push(name) });
		const whole = (own: Tape, rowsOf: Tensor) =>
			groupedMlp(own, { rows: rowsOf, rowProbability: p, offsets }, { fc1, fc2, fc1Bias, fc2Bias }, options);
		const inParts = () => {
			const product = groupedLinear(tape, x, fc1, offsets);
			using hidden = fc1Bias ? addBias(tape, product, fc1Bias, { offsets }) : product;
			using weighted = activation(tape, hidden, options.activation, { ...options, rowProbability: p });
			const out = groupedLinear(tape, weighted, fc2, offsets);
			return fc2Bias ? addBias(tape, out, fc2Bias, { offsets, factor: p }) : out;
		};
		const y =
			way === "one after the other" ? inParts() : way === "recomputed" ? recompute(tape, x, whole) : whole(tape, x);
		const dy = randomValues(rows * shape.hidden, 9).fill(Number.NaN, live * shape.hidden);
		y.gradient!.accumulate(Tensor.from(on, dy, shapes.x, { dtype }));
		const output = y.toFloat32().subarray(0, live * shape.hidden);
		tape.backward(way === "late" ? "late" : "immediate");
		const early = [...ready];
		tape.drain();
		const dx = x.gradient!.take()!;
		const dp = p.gradient!.take()!;
		const result = {
			output,
			dx: dx.toFloat32().subarray(0, live * shape.hidden),
			dp: dp.toFloat32().subarray(0, live),
			...Object.fromEntries(parameters.map(({ name, mainGradient }) => [name, mainGradient!.toFloat32()])),
		};
		for (const one of [...parameters, offsets, plainX, plainP, x, p, y, dx, dp]) one[Symbol.dispose]();
		expect(on.memoryStatistics().liveBytes).toBe(before);
		return { result, early, ready };
	}

	const finite = (values: Float32Array) => values.every(Number.isFinite);

	test("NaN behind the last row reaches nothing", () => {
		const { result } = run();
		for (const [name, values] of Object.entries(result)) {
			expect([name, values.length > 0 && finite(values as Float32Array)]).toEqual([name, true]);
		}
	});

	for (const options of activations) {
		test(`one operation and one after the other agree, ${JSON.stringify(options)}`, () => {
			const [whole, parts] = [run({ options }), run({ options, way: "one after the other" })];
			for (const [name, values] of Object.entries(whole.result)) {
				const other = parts.result[name as "dx"];
				// Both read z as it is stored; only the bias's place and the activation's gradient are rounded once less.
				expect(relativeRms(values as Float32Array, other as Float32Array)).toBeLessThan(3e-7);
			}
			expect(whole.result.output).toEqual(parts.result.output);
			// With biases z is rounded twice one after the other, and other elements may pass a clamp.
			const half = { options, dtype: "bf16", biases: false } as const;
			const [narrow, wide] = [run(half), run({ ...half, way: "one after the other" })];
			for (const [name, values] of Object.entries(narrow.result)) {
				expect(relativeRms(values as Float32Array, wide.result[name as "dx"] as Float32Array)).toBeLessThan(1e-2);
			}
		});
	}

	test("late weight gradients are the immediate ones, bit for bit, and every parameter is ready once", () => {
		for (const dtype of ["f32", "bf16"] as const) {
			const [now, late] = [run({ dtype }), run({ dtype, way: "late" })];
			expect(late.result).toEqual(now.result);
			expect(now.early.toSorted()).toEqual(["b1", "b2", "w1", "w2"]);
			expect(late.early).toEqual([]);
			expect(late.ready.toSorted()).toEqual(["b1", "b2", "w1", "w2"]);
			expect(now.ready.toSorted()).toEqual(["b1", "b2", "w1", "w2"]);
		}
	});

	test("recomputed as kept, bit for bit", () => {
		const [kept, again] = [run(), run({ way: "recomputed" })];
		expect(again.result).toEqual(kept.result);
		expect(again.ready.toSorted()).toEqual(["b1", "b2", "w1", "w2"]);
	});

	test("a rank without rows adds nothing, and its parameters are ready once", () => {
		const { result, ready } = run({ loads: [0, 0, 0] });
		const { w1, w2, b1, b2 } = result as unknown as Operands;
		for (const gradient of [w1, w2, b1, b2]) expect(gradient.every((value) => value === 1)).toBe(true);
		expect(ready.toSorted()).toEqual(["b1", "b2", "w1", "w2"]);
	});

	test("1 and 2 threads agree bit for bit", () => {
		for (const dtype of ["f32", "bf16"] as const) {
			expect(run({ on: single, dtype }).result).toEqual(run({ on: device, dtype }).result);
		}
	});

	test("the reference vector of a layer of zeros with biases", () => {
		const hidden = 3;
		using offsets = Tensor.from(device, Int32Array.of(0, 2, 3));
		const zeros = (name: string, shape: number[]) =>
			new Parameter(name, Tensor.zeros(device, shape), Tensor.zeros(device, shape));
		using fc1 = zeros("w1", [2, 4, hidden]);
		using fc2 = zeros("w2", [2, hidden, 4]);
		const bias = Float32Array.from({ length: 2 * hidden }, (_, i) => (i < hidden ? 2 : 4));
		using fc2Bias = new Parameter("b2", Tensor.from(device, bias, [2, hidden]), Tensor.zeros(device, [2, hidden]));
		using rows = Tensor.from(device, randomValues(3 * hidden, 1), [3, hidden]);
		using plainP = Tensor.from(device, Float32Array.of(0.25, 0.5, 0.125));
		using p = plainP.withGradient(new GradientSlot(device, [3], "f32"));
		const tape = new Tape(device, { recording: true });
		const sorted = { rows, rowProbability: p, offsets };
		using y = groupedMlp(tape, sorted, { fc1, fc2, fc1Bias: null, fc2Bias }, { activation: "squaredRelu" });
		expect([...y.toFloat32()]).toEqual([0.5, 0.5, 0.5, 1, 1, 1, 0.5, 0.5, 0.5]);
		y.gradient!.accumulate(Tensor.from(device, new Float32Array(9).fill(1), [3, hidden]));
		tape.backward();
		using dp = p.gradient!.take()!;
		expect([...dp.toFloat32()]).toEqual([2 * hidden, 2 * hidden, 4 * hidden]);
		expect([...fc2Bias.mainGradient!.toFloat32()]).toEqual([0.75, 0.75, 0.75, 0.125, 0.125, 0.125]);
	});

	test("refuses rows in e4m3 alone for plain products", () => {
		using offsets = Tensor.from(device, Int32Array.of(0, 2));
		using values = Tensor.zeros(device, [2, 4], "u8");
		using numbers = Tensor.zeros(device, [2, 4]);
		const shape = { offsets, rows: 2, groups: 1, hidden: 4, width: 4, interleave: 0, clamp: 1, linear_offset: 0 };
		const weights = { w1: numbers, w1_factors: null, w2: numbers, w2_factors: null, b2: null, row_probability: null };
		const common = { ...shape, ...weights, kind: 0, recipe: 0, dtype: 0 };
		const forward = { ...common, x: null, x_e4m3: values, x_factors: numbers, b1: null, z: null, y: numbers };
		expect(() => device.run("grouped_mlp_forward", forward)).toThrow("grouped_mlp_forward needs");
		const gradients = { dx: null, dz: numbers, hs: null, drow_probability: null, db1: null, db2: null };
		const inE4m3 = { dz_e4m3: null, dz_factors: null, hs_e4m3: null, hs_factors: null };
		const backward = { ...common, ...gradients, ...inE4m3, dy: null, dy_e4m3: values, dy_factors: numbers, z: numbers };
		expect(() => device.run("grouped_mlp_backward", backward)).toThrow("grouped_mlp_backward needs");
	});

	test("refuses rows and weights that do not fit", () => {
		using offsets = Tensor.zeros(device, [3], "i32");
		using rows = Tensor.zeros(device, [2, 4]);
		using rowProbability = Tensor.zeros(device, [2]);
		using fc1 = new Parameter("experts.linear_fc1", Tensor.zeros(device, [2, 3, 5]), null);
		using fc2 = new Parameter("experts.linear_fc2", Tensor.zeros(device, [2, 5, 3]), null);
		const run = () =>
			groupedMlp(
				new Tape(device, { recording: false }),
				{ rows, rowProbability, offsets },
				{ fc1, fc2, fc1Bias: null, fc2Bias: null },
				{ activation: "squaredRelu" },
			);
		expect(run).toThrow("experts.linear_fc2 of shape [2,5,3] cannot take rows of shape [2,4]");
	});
});
