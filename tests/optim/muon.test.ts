/** Muon's update of flat buffers against the formula in float64 on plain arrays, and against torch.optim.Muon. */
import { expect, test } from "bun:test";
import type { MuonOptions } from "../../src/optim/muon.ts";
import { flopsOf, orthogonalize, stepsOf } from "../../src/optim/newton-schulz.ts";
import { Optimizer } from "../../src/optim/optimizer.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { singleReplica } from "../../src/parallel/data-parallel.ts";
import { type ParameterRequest, ParameterSet } from "../../src/parallel/parameter-set.ts";
import { cast, Tensor } from "../../src/tensor/tensor.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { randomValues, relativeRms, testDevice } from "../support.ts";

const adam = { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
const muon: MuonOptions = {
	momentum: 0.9,
	nesterov: false,
	coefficients: "quintic",
	steps: 5,
	scale: "spectral",
	extraScale: 1,
	precision: "medium",
};
const rate = 0.02;
const decay = 0.1;

/** Matrices, rows × columns each, of which the first heights of every period make the first, and so on. */
interface Form {
	readonly shape: readonly number[];
	readonly parts?: readonly number[];
}

/** A model of one parameter on a device: it and its optimizer. */
async function open({ shape, parts }: Form, options: MuonOptions) {
	const stack = new DisposableStack();
	const device = stack.use(await testDevice(1));
	const request: ParameterRequest = {
		...{ name: "weight", shape, dtype: "f32", decays: true, expert: shape.length > 2 },
		...{ replicated: false, copy: "none", frozen: false },
		matrix: { cut: 0, parts: parts ?? null },
	};
	const parameters = stack.use(new ParameterSet(device, [request]));
	const scalars = stack.use(new StepScalars(device));
	const optimizer = stack.use(new Optimizer([singleReplica(parameters)], scalars, { ...adam, muon: options }));
	const parameter = parameters.get("weight");
	device.copyToDevice(parameter.value, randomValues(parameter.value.elements, 1));
	for (const [name, value] of [
		["clipFactor", 0.5],
		["learningRate", rate],
		["weightDecay", decay],
	] as const)
		scalars.set(name, value);
	const stepWith = (gradient: Float32Array) => {
		device.copyToDevice(parameter.mainGradient!, gradient);
		optimizer.step();
		return parameter.value.toFloat32();
	};
	const step = (seed: number) => stepWith(gradients(parameter.value.elements, seed));
	return { parameter, scalars, step, stepWith, [Symbol.dispose]: () => stack.dispose() };
}

const gradients = (elements: number, seed: number) => randomValues(elements, 10 + seed, 3);

/** The same steps in float64. */
function reference({ shape, parts }: Form, options: MuonOptions, steps: number): Float64Array {
	const [rows, columns] = shape.slice(-2) as [number, number];
	const count = shape.length > 2 ? shape[0]! : 1;
	const weights = Float64Array.from(randomValues(count * rows * columns, 1));
	const momentum = new Float64Array(weights.length);
	const heights = parts ?? [rows];
	const period = heights.reduce((sum, height) => sum + height, 0);
	for (let step = 0; step < steps; step++) {
		const gradient = Float64Array.from(gradients(weights.length, step), (g) => g / 2);
		const beta = options.momentum;
		const direction = gradient.map((g, i) => {
			momentum[i] = beta * momentum[i]! + (1 - beta) * g;
			return options.nesterov ? beta * momentum[i]! + (1 - beta) * g : momentum[i]!;
		});
		for (let matrix = 0; matrix < count; matrix++) {
			let first = 0;
			for (const height of heights) {
				const taken: number[] = [];
				for (let row = 0; row < rows; row++) {
					const inside = (row % period) - first;
					if (inside >= 0 && inside < height) taken.push(matrix * rows + row);
				}
				first += height;
				const whole = taken.map((row) => [...direction.subarray(row * columns, (row + 1) * columns)]);
				const size = { spectral: Math.max(taken.length, columns), unit_rms_norm: taken.length / columns };
				const factor = { ...size, shape_scaling: Math.max(1, taken.length / columns) }[options.scale];
				const update = iterated(whole, stepsOf(options.coefficients, options.steps));
				taken.forEach((row, at) => {
					for (let column = 0; column < columns; column++) {
						const i = row * columns + column;
						const u = options.extraScale * Math.sqrt(factor) * update[at]![column]!;
						weights[i] = weights[i]! * (1 - rate * decay) - rate * u;
					}
				});
			}
		}
	}
	return weights;
}

type Matrix = readonly (readonly number[])[];
const product = (a: Matrix, b: Matrix) =>
	a.map((row) => b[0]!.map((_, column) => row.reduce((sum, value, k) => sum + value * b[k]![column]!, 0)));
const transposed = (a: Matrix) => a[0]!.map((_, column) => a.map((row) => row[column]!));
const sum = (...terms: readonly (readonly [number, Matrix])[]) =>
	terms[0]![1].map((row, i) => row.map((_, j) => terms.reduce((all, [factor, of]) => all + factor * of[i]![j]!, 0)));

function iterated(x: Matrix, steps: ReturnType<typeof stepsOf>): Matrix {
	if (x.length > x[0]!.length) return transposed(iterated(transposed(x), steps));
	const norm = Math.hypot(...x.flat());
	return steps.reduce<Matrix>(
		(value, [a, b, c]) => {
			const gram = product(value, transposed(value));
			return sum([a, value], [1, product(sum([b, gram], [c, product(gram, gram)]), value)]);
		},
		x.map((row) => row.map((value) => value / norm)),
	);
}

const forms: Readonly<Record<string, Form>> = {
	"a wide matrix": { shape: [6, 17] },
	"a tall matrix": { shape: [19, 5] },
	experts: { shape: [3, 8, 12] },
	"queries, keys and values": { shape: [24, 10], parts: [6, 3, 3] },
	"a single row": { shape: [1, 9] },
};

for (const [title, form] of Object.entries(forms)) {
	test(`three steps of ${title} are those of float64`, async () => {
		using model = await open(form, muon);
		const [, , last] = [0, 1, 2].map(model.step);
		expect(relativeRms(last!, reference(form, muon, 3))).toBeLessThan(1e-6);
	});
}

for (const options of [
	{ nesterov: true },
	{ scale: "unit_rms_norm" },
	{ scale: "shape_scaling", extraScale: 0.2 },
	{ coefficients: "polar_express", steps: 9 },
	{ coefficients: "cans", steps: 6 },
	{ coefficients: "simple", steps: 3 },
	{ coefficients: "aol", steps: 4 },
] as const) {
	test(`with ${JSON.stringify(options)}`, async () => {
		const form = forms["a tall matrix"]!;
		const all = { ...muon, ...options };
		using model = await open(form, all);
		model.step(0);
		expect(relativeRms(model.step(1), reference(form, all, 2))).toBeLessThan(1e-6);
	});
}

test("fixed numbers: 2 × 3, one step", async () => {
	using model = await open({ shape: [2, 3] }, { ...muon, coefficients: "simple", steps: 1, momentum: 0 });
	const { parameter, scalars } = model;
	scalars.set("clipFactor", 1);
	scalars.set("weightDecay", 0);
	scalars.set("learningRate", 1);
	parameter.value.device.copyToDevice(parameter.value, new Float32Array(6));
	// Singular values 3 and 4, over the norm 0.6 and 0.8; the step makes 3.4445 s - 4.775 s³ + 2.0315 s⁵ of each, times √3.
	const after = model.stepWith(Float32Array.of(3, 0, 0, 0, 4, 0));
	const expected = [-2.0668033, 0, 0, 0, -1.6913163, 0];
	expected.forEach((value, i) => {
		expect(after[i]).toBeCloseTo(value, 6);
	});
});

test("a step whose gradient is not finite changes nothing", async () => {
	using model = await open({ shape: [4, 4] }, muon);
	const before = model.step(0);
	model.scalars.set("foundInf", 1);
	const { device } = model.parameter.value;
	device.copyToDevice(model.parameter.mainGradient!, new Float32Array(16).fill(Number.NaN));
	expect(model.step(1)).toEqual(before);
	model.scalars.set("foundInf", 0);
	using other = await open({ shape: [4, 4] }, muon);
	other.step(0);
	expect(model.step(2)).toEqual(other.step(2));
});

test("products in bf16, as on GPUs, give the same but for roundings", async () => {
	using device = await testDevice(1);
	for (const shape of [
		[3, 16, 40],
		[2, 40, 24],
	]) {
		using x = Tensor.from(
			device,
			randomValues(
				shape.reduce((all, size) => all * size),
				5,
			),
			shape,
		);
		using exact = orthogonalize(x, stepsOf("quintic", 5), "f32");
		using rounded = orthogonalize(x, stepsOf("quintic", 5), "bf16");
		using wide = cast(rounded, "f32");
		const difference = relativeRms(wide.toFloat32(), exact.toFloat32());
		expect(difference).toBeLessThan(2e-2);
		expect(difference).toBeGreaterThan(1e-4);
	}
});

test("FLOPs of an iteration", () => {
	// X Xᵀ: 2 · 2² · 3, its square: 2 · 2³, the product with X: 2 · 2² · 3.
	expect(flopsOf(2, 3, 1)).toBe(24 + 16 + 24);
	expect(flopsOf(3, 2, 5)).toBe(5 * 64);
});

const python = referencePython("torch");
const script = `
import json, sys, torch
for case in json.loads(sys.argv[1]):
    p = torch.nn.Parameter(torch.tensor(case["weights"]).reshape(case["shape"]))
    optimizer = torch.optim.Muon([p], lr=case["rate"], weight_decay=case["decay"], momentum=case["momentum"],
        nesterov=case["nesterov"], ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5, adjust_lr_fn="original")
    for gradient in case["gradients"]:
        p.grad = torch.tensor(gradient).reshape(case["shape"])
        optimizer.step()
    print(json.dumps(p.detach().flatten().tolist()))
`;

// torch.optim.Muon iterates in bf16, of 8 bits; its weights move by 0.1 of what they are in these steps.
test.skipIf(python === null)(
	"torch.optim.Muon agrees as far as its bf16 goes",
	async () => {
		const cases = ["a wide matrix", "a tall matrix"].flatMap((title) =>
			[false, true].map((nesterov) => ({ form: forms[title]!, nesterov })),
		);
		const options = (nesterov: boolean): MuonOptions => ({
			...muon,
			...{ nesterov, coefficients: "simple", scale: "shape_scaling" },
		});
		const given = cases.map(({ form: { shape }, nesterov }) => {
			const elements = shape[0]! * shape[1]!;
			const halved = (seed: number) => [...gradients(elements, seed)].map((g) => g / 2);
			const weights = [...randomValues(elements, 1)];
			return { shape, weights, gradients: [0, 1, 2].map(halved), rate, decay, momentum: muon.momentum, nesterov };
		});
		const lines = (await runPython(python!, ["-c", script, JSON.stringify(given)])).trim().split("\n");
		expect(lines).toHaveLength(cases.length);
		for (const [index, { form, nesterov }] of cases.entries()) {
			using model = await open(form, options(nesterov));
			const [, , last] = [0, 1, 2].map(model.step);
			expect(relativeRms(last!, JSON.parse(lines[index]!) as number[])).toBeLessThan(1e-3);
		}
	},
	60_000,
);
