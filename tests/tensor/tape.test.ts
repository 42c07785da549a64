import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { add } from "../../src/tensor/ops/add.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape, type WeightGradients } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, relativeRms } from "../support.ts";
import { openDeviceWithoutLeaks } from "./devices.ts";

let device: Device;
openDeviceWithoutLeaks((opened) => {
	device = opened;
});

const [tokens, width] = [9, 12];

/** Two layers of norm and projection. */
class Model implements Disposable {
	readonly weights = [0, 1].map((i) => this.#parameter(`weight${i}`, [width, width], i));
	readonly norms = [0, 1].map((i) => this.#parameter(`norm${i}`, [width], 10 + i));

	get parameters(): Parameter[] {
		return [...this.weights, ...this.norms];
	}

	gradients(): Float32Array[] {
		return this.parameters.map((parameter) => parameter.mainGradient!.toFloat32());
	}

	[Symbol.dispose](): void {
		for (const parameter of this.parameters) parameter[Symbol.dispose]();
	}

	#parameter(name: string, shape: number[], seed: number): Parameter {
		const elements = shape.reduce((a, b) => a * b, 1);
		return new Parameter(name, Tensor.from(device, randomValues(elements, seed), shape), Tensor.zeros(device, shape));
	}
}

/** A value with a slot of its own, as a stage's input has. */
function input(seed: number): Tensor {
	using plain = Tensor.from(device, randomValues(tokens * width, seed), [tokens, width]);
	return plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
}

/** A microbatch: its forward in two segments, x skipping the first as a residual into the second. */
function microbatch(model: Model, seed: number) {
	const tape = new Tape(device, { recording: true });
	const x = input(seed);
	const first = tape.begin("first");
	using a = rmsNorm(tape, x, model.norms[0]!, 1e-5);
	using b = linear(tape, a, model.weights[0]!);
	const second = tape.begin("second");
	using c = add(tape, b, x);
	using d = rmsNorm(tape, c, model.norms[1]!, 1e-5);
	using e = linear(tape, d, model.weights[1]!);
	using y = add(tape, e, c);
	y.gradient!.accumulate(Tensor.from(device, randomValues(tokens * width, 100 + seed), [tokens, width]));
	return { tape, x, first, second };
}

/** Takes the gradient that reached x, and disposes x. */
function finish(x: Tensor): Float32Array {
	using gradient = x.gradient!.take()!;
	const values = gradient.toFloat32();
	x[Symbol.dispose]();
	return values;
}

describe("segments", () => {
	/** One microbatch after the other, weight gradients at once. */
	function sequential(): { weights: Float32Array[]; inputs: Float32Array[] } {
		using model = new Model();
		const inputs = [1, 2].map((seed) => {
			const { tape, x } = microbatch(model, seed);
			tape.backward();
			return finish(x);
		});
		return { weights: model.gradients(), inputs };
	}

	test("two live microbatches run backward interleaved, with late weight gradients, to the same gradients", () => {
		const expected = sequential();
		using model = new Model();
		const one = microbatch(model, 1);
		const two = microbatch(model, 2);
		one.tape.backwardSegment(one.second, "late");
		two.tape.backwardSegment(two.second, "late");
		expect(model.weights.every((weight) => weight.mainGradient!.toFloat32().every((g) => g === 0))).toBe(true);
		one.tape.backwardSegment(one.first, "late");
		two.tape.backwardSegment(two.first, "late");
		// In the order of the sequential run, so that sums round alike.
		for (const { tape } of [one, two]) tape.drain();
		expect([one.x, two.x].map(finish)).toEqual(expected.inputs);
		expect(model.gradients()).toEqual(expected.weights);
	});

	test("in any other order the gradients agree to rounding", () => {
		const expected = sequential();
		using model = new Model();
		const one = microbatch(model, 1);
		const two = microbatch(model, 2);
		two.tape.backwardSegment(two.second, "late");
		two.tape.drain(two.second);
		one.tape.backward();
		two.tape.backwardSegment(two.first, "late");
		two.tape.drain(two.first);
		expect([one.x, two.x].map(finish)).toEqual(expected.inputs);
		for (const [i, gradient] of model.gradients().entries()) {
			expect(relativeRms(gradient, expected.weights[i]!)).toBeLessThan(1e-6);
		}
	});

	test("backward leaves late weight gradients in them, draining nothing", () => {
		using model = new Model();
		const { tape, x } = microbatch(model, 1);
		const left = () => tape.segments.map((s) => [s.name, s.entries.length, s.tasks.length]);
		tape.backward("late");
		expect(left()).toEqual([
			["first", 0, 1],
			["second", 0, 1],
		]);
		tape.drain();
		expect(left()).toEqual([
			["first", 0, 0],
			["second", 0, 0],
		]);
		finish(x);
	});
});

describe("a weight gradient that hides a sum", () => {
	interface Options {
		readonly hides: boolean;
		readonly sums: boolean;
		readonly segments: boolean;
		readonly weightGradients?: WeightGradients;
	}

	/** Two projections, of which the last weight gradient may hide a sum. Returns the events of backward in order, and the gradients. */
	function backwardOf(options: Options) {
		using model = new Model();
		const events: string[] = [];
		const tape = new Tape(device, { recording: true, onGradient: ({ name }) => events.push(name) });
		const x = input(1);
		const sumInputGradient = () => {
			events.push("sum");
			return { wait: () => void events.push("summed") };
		};
		using a = linear(tape, x, model.weights[0]!, null, options.sums ? { sumInputGradient } : {});
		if (options.segments) tape.begin("second");
		using y = linear(tape, a, model.weights[1]!, null, { weightGradientHides: options.hides });
		y.gradient!.accumulate(Tensor.from(device, randomValues(tokens * width, 2), [tokens, width]));
		tape.backward(options.weightGradients);
		if (options.weightGradients === "late") events.push("|");
		tape.drain();
		return { events, gradients: [finish(x), ...model.gradients()] };
	}

	for (const [what, options, events] of [
		["behind a sum", { sums: true, segments: false }, ["sum", "weight1", "summed", "weight0"]],
		["at the end of its segment", { sums: true, segments: true }, ["weight1", "sum", "summed", "weight0"]],
		["where nothing is summed", { sums: false, segments: false }, ["weight0", "weight1"]],
	] as const) {
		test(`runs ${what}, to the same values; its parameter is ready then`, () => {
			const hidden = backwardOf({ hides: true, ...options });
			expect(hidden.events).toEqual([...events]);
			expect(hidden.gradients).toEqual(backwardOf({ hides: false, ...options }).gradients);
		});
	}

	test("hides none when it is late", () => {
		const late = backwardOf({ hides: true, sums: true, segments: false, weightGradients: "late" });
		expect(late.events).toEqual(["sum", "summed", "|", "weight1", "weight0"]);
		expect(late.gradients).toEqual(backwardOf({ hides: false, sums: true, segments: false }).gradients);
	});
});

test("a value that skips a segment gathers both gradients in its own slot", () => {
	checkGradients(device, {
		inputs: { x: { values: randomValues(6, 1), shape: [2, 3] } },
		parameters: { w: { values: randomValues(9, 2), shape: [3, 3] } },
		forward: (tape, { x }, { w }) => {
			tape.begin("branch");
			using branch = linear(tape, x!, w!);
			tape.begin("join");
			return add(tape, branch, x!);
		},
		reference: ({ x, w }) =>
			x!.map((value, i) => {
				const [row, column] = [i - (i % 3), i % 3];
				return value + [0, 1, 2].reduce((sum, k) => sum + x![row + k]! * w![column * 3 + k]!, 0);
			}),
	});
});

describe("memory", () => {
	test("the tape alone keeps what backward needs, and lets go of it segment by segment", () => {
		using model = new Model();
		const before = device.memoryStatistics().liveBytes;
		const { tape, x, first, second } = microbatch(model, 1);
		const live = [device.memoryStatistics().liveBytes];
		for (const segment of [second, first]) {
			tape.backwardSegment(segment);
			live.push(device.memoryStatistics().liveBytes);
		}
		expect(live).toEqual(live.toSorted((a, b) => b - a));
		expect(live[0]! - before).toBeGreaterThan(5 * tokens * width * 4);
		expect(live[2]! - before).toBe(2 * tokens * width * 4); // x and its gradient
		finish(x);
	});

	test("every late weight gradient lets go of what it read when it is computed, not later", () => {
		using model = new Model();
		const before = device.memoryStatistics().liveBytes;
		const { tape, x, first, second } = microbatch(model, 1);
		tape.backward("late");
		const live = () => device.memoryStatistics().liveBytes - before;
		const rows = tokens * width * 4;
		// x, its gradient, and input and output gradient of both projections; the second output gradient is y's own.
		const all = live();
		expect(all).toBe(6 * rows);
		tape.drain(second);
		expect(live()).toBe(all - 2 * rows);
		tape.drain(first);
		expect(live()).toBe(2 * rows);
		finish(x);
	});

	test("a frozen weight leaves no task", () => {
		using frozen = new Parameter("w", Tensor.from(device, randomValues(width * width, 2), [width, width]), null);
		const tape = new Tape(device, { recording: true });
		const x = input(1);
		using y = linear(tape, x, frozen);
		y.gradient!.accumulate(Tensor.from(device, randomValues(tokens * width, 2), [tokens, width]));
		tape.backward("late");
		expect(tape.segments.flatMap((segment) => segment.tasks)).toEqual([]);
		finish(x);
	});

	test("without recording nothing is kept", () => {
		using model = new Model();
		const before = device.memoryStatistics().liveBlocks;
		using x = input(1);
		using a = rmsNorm(new Tape(device, { recording: false }), x, model.norms[0]!, 1e-5);
		expect(a.gradient).toBeNull();
		expect(device.memoryStatistics().liveBlocks).toBe(before + 2);
	});

	test("discard releases everything: before backward, in the middle, with late weight gradients", () => {
		for (const segments of [0, 1, 2]) {
			using model = new Model();
			const before = device.memoryStatistics().liveBytes;
			const { tape, x, first, second } = microbatch(model, 1);
			for (const segment of [second, first].slice(0, segments)) tape.backwardSegment(segment, "late");
			tape.discard();
			tape.drain();
			x.gradient!.clear();
			x[Symbol.dispose]();
			expect(device.memoryStatistics().liveBytes).toBe(before);
			expect(model.weights[0]!.mainGradient!.toFloat32().every((g) => g === 0)).toBe(true);
		}
	});

	test("a gradient that no input or parameter wants is not computed", () => {
		using x = Tensor.from(device, randomValues(6, 1), [2, 3]);
		using frozen = new Parameter("w", Tensor.from(device, randomValues(9, 2), [3, 3]), null);
		const tape = new Tape(device, { recording: true });
		using y = linear(tape, x, frozen);
		expect(y.gradient).toBeNull();
		expect(tape.segments.flatMap((segment) => segment.entries)).toEqual([]);
	});

	test("a branch whose output received no gradient is skipped, its memory released", () => {
		using model = new Model();
		const tape = new Tape(device, { recording: true });
		using x = input(1);
		using a = rmsNorm(tape, x, model.norms[0]!, 1e-5);
		const unused = linear(tape, a, model.weights[0]!);
		unused[Symbol.dispose]();
		using y = linear(tape, a, model.weights[1]!);
		y.gradient!.accumulate(Tensor.from(device, randomValues(tokens * width, 5), [tokens, width]));
		tape.backward();
		expect(model.weights[0]!.mainGradient!.toFloat32().every((g) => g === 0)).toBe(true);
		expect(model.weights[1]!.mainGradient!.toFloat32().some((g) => g !== 0)).toBe(true);
		x.gradient!.clear();
	});
});

describe("shared gradients are never written in place", () => {
	const slot = () => new GradientSlot(device, [2, 2], "f32");
	const values = (...numbers: number[]) => Tensor.from(device, Float32Array.from(numbers), [2, 2]);
	const read = (from: GradientSlot) => {
		using gradient = from.take()!;
		return [...gradient.toFloat32()];
	};

	test("adding to one of two slots leaves the other", () => {
		const [a, b] = [slot(), slot()];
		const shared = values(1, 2, 3, 4);
		a.accumulate(shared.share());
		b.accumulate(shared);
		a.accumulate(values(10, 10, 10, 10));
		expect([read(a), read(b)]).toEqual([
			[11, 12, 13, 14],
			[1, 2, 3, 4],
		]);
	});

	test("an operation that fuses its own sees a fresh target while the gradient is shared, the old one when alone", () => {
		const a = slot();
		const shared = values(1, 2, 3, 4);
		const fuse = () => {
			let inPlace = false;
			a.fuse((previous, target) => {
				inPlace = previous === target;
				device.run("add", { a: previous!, b: previous!, y: target, elements: 4, dtype: target.dtypeCode });
			});
			return inPlace;
		};
		a.accumulate(shared.share());
		expect(fuse()).toBe(false);
		expect([...shared.toFloat32()]).toEqual([1, 2, 3, 4]);
		expect(fuse()).toBe(true);
		expect(read(a)).toEqual([4, 8, 12, 16]);
		shared[Symbol.dispose]();
	});

	test("a late weight gradient still finds the gradient it was given", () => {
		// y = W x + x, then the sum once more: the slot of x receives y's own gradient while W's still needs it.
		const run = (weightGradients: WeightGradients) => {
			using model = new Model();
			const tape = new Tape(device, { recording: true });
			using x = input(3);
			using branch = linear(tape, x, model.weights[0]!);
			using y = add(tape, branch, x);
			using z = add(tape, y, x);
			z.gradient!.accumulate(Tensor.from(device, randomValues(tokens * width, 6), [tokens, width]));
			tape.backward(weightGradients);
			tape.drain();
			using dx = x.gradient!.take()!;
			return [dx.toFloat32(), model.weights[0]!.mainGradient!.toFloat32()];
		};
		expect(run("late")).toEqual(run("immediate"));
	});
});
