/** Shared by tests: a device on the CPU library, seeded numbers, gradient checks. */
import { type Device, Device as DeviceClass } from "../src/native/device.ts";
import { type Library, openLibrary } from "../src/native/library.ts";
import { GradientSlot } from "../src/tensor/gradient.ts";
import { Parameter } from "../src/tensor/parameter.ts";
import { Tape } from "../src/tensor/tape.ts";
import { Tensor } from "../src/tensor/tensor.ts";

/** The CPU library (or MIMO_TEST_DEVICE=cuda). */
export async function testLibrary(): Promise<Library> {
	return await openLibrary(process.env.MIMO_TEST_DEVICE === "cuda" ? "cuda" : "cpu");
}

/** A device of it. */
export async function testDevice(threads = 2): Promise<Device> {
	return DeviceClass.open(await testLibrary(), { threads });
}

/** Numbers that repeat: mulberry32, uniform in [-1, 1). */
export function randomValues(count: number, seed: number, scale = 1): Float32Array {
	let state = seed >>> 0;
	return Float32Array.from({ length: count }, () => {
		state = (state + 0x6d2b79f5) >>> 0;
		let t = Math.imul(state ^ (state >>> 15), 1 | state);
		t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
		return (((t ^ (t >>> 14)) >>> 0) / 2 ** 31 - 1) * scale;
	});
}

export function bytesOf(tensor: Tensor): Uint8Array {
	const bytes = new Uint8Array(tensor.bytes);
	tensor.device.copyToHost(bytes, tensor);
	return bytes;
}

/** Root mean square of the difference over the reference's, with a floor for all-zero references. */
export function relativeRms(actual: ArrayLike<number>, expected: ArrayLike<number>): number {
	let difference = 0;
	let size = 0;
	for (let i = 0; i < expected.length; i++) {
		difference += (actual[i]! - expected[i]!) ** 2;
		size += expected[i]! ** 2;
	}
	if (actual.length !== expected.length) return Number.POSITIVE_INFINITY;
	return Math.sqrt(difference / Math.max(size, 1e-30));
}

export interface CheckedOperation {
	/** Differentiable inputs: values and shapes. */
	readonly inputs: Readonly<Record<string, { values: Float32Array; shape: readonly number[] }>>;
	/** Trainable parameters. */
	readonly parameters?: Readonly<Record<string, { values: Float32Array; shape: readonly number[] }>>;
	/** Runs the operation on tensors and parameters of those names. */
	readonly forward: (tape: Tape, x: Record<string, Tensor>, w: Record<string, Parameter>) => Tensor;
	/**
	 * The same in float64 on plain arrays; gradients of Σ weights·output are taken from it by central differences.
	 */
	readonly reference: (values: Record<string, Float64Array>) => Float64Array;
	/** Largest relative rms difference of outputs and gradients. */
	readonly tolerance?: number;
	/** The weights of the outputs; default: random ones. */
	readonly weights?: Float32Array;
}

/**
 * Checks an operation's output and every gradient against a float64 reference. Gradients are of Σ r_i y_i with fixed
 * random r; the reference's come from central differences in float64, exact to about 1e-9. Those of parameters are added to
 * gradients that are there.
 */
export function checkGradients(device: Device, operation: CheckedOperation): void {
	const tolerance = operation.tolerance ?? 2e-5;
	const before = device.memoryStatistics().liveBytes;
	const values: Record<string, Float64Array> = {};
	const inputs: Record<string, Tensor> = {};
	const parameters: Record<string, Parameter> = {};
	for (const [name, { values: v, shape }] of Object.entries(operation.inputs)) {
		values[name] = Float64Array.from(v);
		using plain = Tensor.from(device, v, shape);
		inputs[name] = plain.withGradient(new GradientSlot(device, shape, "f32"));
	}
	for (const [name, { values: v, shape }] of Object.entries(operation.parameters ?? {})) {
		values[name] = Float64Array.from(v);
		const before = Tensor.from(device, earlierGradient(v.length), shape);
		parameters[name] = new Parameter(name, Tensor.from(device, v, shape), before);
	}
	const tape = new Tape(device, { recording: true });
	const y = operation.forward(tape, inputs, parameters);
	const actual = y.toFloat32();
	const expected = operation.reference(values);
	assertClose("output", actual, expected, tolerance);
	const weights = operation.weights ?? randomValues(actual.length, 4711);
	y.gradient!.accumulate(Tensor.from(device, weights, y.shape));
	tape.backward();
	for (const [name, tensor] of Object.entries(inputs)) {
		using gradient = tensor.gradient!.take();
		const got = gradient ? gradient.toFloat32() : new Float32Array(tensor.elements);
		assertClose(`gradient of ${name}`, got, numericGradient(operation.reference, values, name, weights), tolerance);
	}
	for (const [name, parameter] of Object.entries(parameters)) {
		const before = earlierGradient(parameter.value.elements);
		const got = parameter.mainGradient!.toFloat32().map((value, i) => value - before[i]!);
		assertClose(`gradient of ${name}`, got, numericGradient(operation.reference, values, name, weights), tolerance);
	}
	y[Symbol.dispose]();
	for (const tensor of [...Object.values(inputs), ...Object.values(parameters)]) tensor[Symbol.dispose]();
	const after = device.memoryStatistics().liveBytes;
	if (after !== before) throw new Error(`${after - before} bytes of device memory leaked.`);
}

/** Of a microbatch before: a parameter's gradient is added to it. Small, so that it costs the sum no digits that count. */
function earlierGradient(count: number): Float32Array {
	return randomValues(count, 815, 2 ** -6);
}

function assertClose(what: string, actual: ArrayLike<number>, expected: ArrayLike<number>, tolerance: number): void {
	const error = relativeRms(actual, expected);
	if (!(error <= tolerance)) throw new Error(`${what} is off by ${error.toExponential(2)} rms (limit ${tolerance}).`);
}

function numericGradient(
	reference: CheckedOperation["reference"],
	values: Record<string, Float64Array>,
	name: string,
	weights: Float32Array,
): Float64Array {
	const x = values[name]!;
	const loss = () => reference(values).reduce((sum, y, i) => sum + y * weights[i]!, 0);
	return Float64Array.from(x, (original, i) => {
		const step = 1e-5 * Math.max(1, Math.abs(original));
		x[i] = original + step;
		const up = loss();
		x[i] = original - step;
		const down = loss();
		x[i] = original;
		return (up - down) / (2 * step);
	});
}
