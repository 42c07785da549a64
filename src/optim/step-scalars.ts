/**
 * Scalars of an optimizer step in device memory, so that kernels read the learning rate, the clip factor and found-inf without a
 * wait for the host.
 */
import type { Device } from "../native/device.ts";
import { Tensor } from "../tensor/index.ts";

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
	/** Σ g² of this rank's gradients, fp64. */
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

	/** The scalar as a tensor on the device, f32. */
	get(name: (typeof floats)[number]): Tensor {
		return this.#views[name];
	}

	set(name: (typeof floats)[number], value: number): void {
		this.device.copyToDevice(this.#views[name], new Float32Array([value]));
	}

	/** Sets the number of optimizer steps taken, after loading a checkpoint. */
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
