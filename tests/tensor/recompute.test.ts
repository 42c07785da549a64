/** Recomputed parts: their bits, and when their memory comes and goes. */
import { expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { add } from "../../src/tensor/ops/add.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { type Computation, offload, Recomputed } from "../../src/tensor/recompute.ts";
import { Tape, type WeightGradients } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";
import { openDeviceWithoutLeaks } from "./devices.ts";

let device: Device;
openDeviceWithoutLeaks((opened) => {
	device = opened;
});
const live = () => device.memoryStatistics().liveBytes;

const [rows, width] = [512, 64];
const bytes = 4 * rows * width;

function weights() {
	const of = (name: string, shape: number[], seed: number) => {
		const elements = shape.reduce((product, size) => product * size, 1);
		return new Parameter(name, Tensor.from(device, randomValues(elements, seed), shape), Tensor.zeros(device, shape));
	};
	const all = { norm: of("norm", [width], 1), product: of("product", [width, width], 2) };
	return { ...all, [Symbol.dispose]: () => [all.norm, all.product].map((one) => one[Symbol.dispose]()) };
}
type Weights = ReturnType<typeof weights>;

function input(): Tensor {
	using values = Tensor.from(device, randomValues(rows * width, 3), [rows, width]);
	return values.withGradient(new GradientSlot(device, values.shape, "f32"));
}

/** x + product(norm(x)), whose norm is recomputed. */
function layer(tape: Tape, x: Tensor, { norm, product }: Weights, part: typeof Recomputed | null): Tensor {
	const compute: Computation = (on, value) => rmsNorm(on, value, norm, 1e-5);
	if (part === null) {
		using u = compute(tape, x);
		using branch = linear(tape, u, product);
		return add(tape, x, branch);
	}
	using u = new part(tape, [x], compute);
	using branch = linear(tape, u.y, product);
	u.drop();
	return add(tape, x, branch);
}

/** Output and gradients of two layers with the same weights, and the memory held between forward and backward. */
function run(part: typeof Recomputed | null, mode: WeightGradients) {
	using all = weights();
	using x = input();
	const tape = new Tape(device, { recording: true });
	const before = live();
	using y = (() => {
		using between = layer(tape, x, all, part);
		return layer(tape, between, all, part);
	})();
	const held = live() - before;
	const output = y.toFloat32();
	y.gradient!.accumulate(Tensor.from(device, randomValues(rows * width, 4), [rows, width]));
	tape.backward(mode);
	tape.drain();
	using dx = x.gradient!.take()!;
	const gradients = [dx, all.norm.mainGradient!, all.product.mainGradient!].map((one) => one.toFloat32());
	return { held, values: [output, ...gradients] };
}

for (const mode of ["immediate", "late"] as const) {
	test(`a dropped value changes no bit, ${mode} weight gradients`, () => {
		const plain = run(null, mode);
		const dropped = run(Recomputed, mode);
		expect(dropped.values).toEqual(plain.values);
		// The norms' outputs and their statistics.
		expect(plain.held - dropped.held).toBe(2 * (bytes + 4 * rows));
	});
}

test("what is dropped cannot be read before backward has come to it", () => {
	using all = weights();
	using x = input();
	const tape = new Tape(device, { recording: true });
	using u = new Recomputed(tape, [x], (on, value) => rmsNorm(on, value, all.norm, 1e-5));
	const before = live();
	u.drop();
	expect(before - live()).toBe(bytes);
	expect(() => u.y.toFloat32()).toThrow("suspended");
	expect(() => u.drop()).toThrow("suspended twice");
	tape.discard();
});

test("a pass that is given up between the second forward and its backward leaves nothing", () => {
	using all = weights();
	using x = input();
	const tape = new Tape(device, { recording: true });
	using y = layer(tape, x, all, Recomputed);
	y.gradient!.accumulate(Tensor.zeros(device, [rows, width]));
	tape.onReturn("fail", () => {
		throw new Error("given up");
	});
	// Recorded last, so its backward runs first.
	expect(() => tape.backward()).toThrow("given up");
	tape.discard();
	x.gradient!.clear();
});

test("values in the host's memory: the device's is given back, and the gradients are the same", () => {
	const run = (away: boolean) => {
		using all = weights();
		using x = input();
		const tape = new Tape(device, { recording: true });
		const before = live();
		using y = [0, 1, 2, 3].reduce((sum, _) => {
			using from = sum;
			using u = rmsNorm(tape, from, all.norm, 1e-5);
			using branch = linear(tape, u, all.product);
			if (away) offload(tape, u);
			return add(tape, from, branch);
		}, x.share());
		const held = live() - before;
		y.gradient!.accumulate(Tensor.from(device, randomValues(rows * width, 4), [rows, width]));
		tape.backward();
		using dx = x.gradient!.take()!;
		const gradients = [all.norm, all.product].map(({ mainGradient }) => mainGradient!.toFloat32());
		return { held, results: [y.toFloat32(), dx.toFloat32(), ...gradients] };
	};
	const [plain, moved] = [run(false), run(true)];
	expect(moved.results).toEqual(plain.results);
	// Two copies are on their way.
	expect(moved.held).toBe(plain.held - 2 * bytes);
});

test("values in the host's memory are released after an error in backward, on their way back too", () => {
	using all = weights();
	using x = input();
	const tape = new Tape(device, { recording: true });
	const norms = [0, 1, 2, 3].map(() => rmsNorm(tape, x, all.norm, 1e-5));
	const outputs = norms.map((u) => {
		const y = linear(tape, u, all.product);
		offload(tape, u);
		u[Symbol.dispose]();
		if (tape.segments.at(-1)!.entries.length === 8) {
			tape.onReturn("fail", () => {
				throw new Error("given up");
			});
		}
		return y;
	});
	for (const y of outputs) y.gradient!.accumulate(Tensor.zeros(device, [rows, width]));
	expect(() => tape.backward()).toThrow("given up");
	tape.discard();
	for (const y of outputs) y[Symbol.dispose]();
	x.gradient!.clear();
});

test("a tape that does not record drops nothing", () => {
	using all = weights();
	using x = input();
	const tape = new Tape(device, { recording: false });
	using u = new Recomputed(tape, [x], (on, value) => rmsNorm(on, value, all.norm, 1e-5));
	u.drop();
	expect(u.y.toFloat32()[0]).toBeFinite();
});

test("inputs without gradients, frozen weights: the value is kept, there is nothing to compute again", () => {
	const constant = (values: number) => Tensor.from(device, randomValues(values, 1), [values]);
	using frozen = new Parameter("frozen", constant(width), null);
	using x = Tensor.from(device, randomValues(rows * width, 3), [rows, width]);
	const tape = new Tape(device, { recording: true });
	using u = new Recomputed(tape, [x], (on, value) => rmsNorm(on, value, frozen, 1e-5));
	u.drop();
	expect(u.y.toFloat32()[0]).toBeFinite();
	expect(u.y.gradient).toBeNull();
});
