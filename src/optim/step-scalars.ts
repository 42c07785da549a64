/**
 * Scalars of one optimizer step, kept in device memory so that a device never waits for the host: kernels read the
 * learning rate, the clip factor or whether anything was infinite from here.
 */
import type { Device } from "../native/device.ts";
import { Tensor } from "../tensor/tensor.ts";

const floats = [
	"learningRate",
	"weightDecay",
	"factor",
	"gradientNorm",
	"clipFactor",
	"foundInf",
	"biasCorrection1",
	"biasCorrection2",
] as const;

export class StepScalars implements Disposable {
	readonly #values: Tensor;
	readonly #doubles: Tensor;
	readonly #views: Record<(typeof floats)[number], Tensor>;
	/** Σ g² over the gradients, fp64. */
	readonly sumOfSquares: Tensor;
	/** Optimizer steps taken, int32. */
	readonly step: Tensor;

	constructor(readonly device: Device) {
		this.#values = Tensor.zeros(device, [floats.length], "f32", "optimizer");
		this.#doubles = Tensor.zeros(device, [1], "f64", "optimizer");
		this.#views = Object.fromEntries(floats.map((name, index) => [name, this.#values.columns(index, 1)])) as Record<
			(typeof floats)[number],
			Tensor
		>;
		this.sumOfSquares = this.#doubles;
		this.step = Tensor.zeros(device, [1], "i32", "optimizer");
	}

	/** The device-side scalar of that name, f32. */
	get(name: (typeof floats)[number]): Tensor {
		return this.#views[name];
	}

	set(name: (typeof floats)[number], value: number): void {
		this.device.copyToDevice(this.#views[name], new Float32Array([value]));
	}

	/** After loading: `steps` optimizer steps were taken. */
	setStep(steps: number): void {
		this.device.copyToDevice(this.step, Int32Array.of(steps));
	}

	/** Reads all scalars in one copy; waits for the device. */
	read(): Record<(typeof floats)[number], number> {
		const values = this.#values.toFloat32();
		return Object.fromEntries(floats.map((name, index) => [name, values[index]!])) as Record<
			(typeof floats)[number],
			number
		>;
	}

	[Symbol.dispose](): void {
		for (const view of Object.values(this.#views)) view[Symbol.dispose]();
		this.#values[Symbol.dispose]();
		this.#doubles[Symbol.dispose]();
		this.step[Symbol.dispose]();
	}
}
