/** When a tape tells that a parameter's gradient is complete, which starts its sum over data-parallel replicas. */
import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { rmsNorm } from "../../src/tensor/ops/rms-norm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { recompute } from "../../src/tensor/recompute.ts";
import { Tape, type WeightGradients } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";
import { openDeviceWithoutLeaks } from "./devices.ts";

let device: Device;
openDeviceWithoutLeaks((opened) => {
	device = opened;
});

describe("complete gradients", () => {
	const weightOf = (name: string, trainable = true) =>
		new Parameter(
			name,
			Tensor.from(device, randomValues(4, 1), [2, 2]),
			trainable ? Tensor.zeros(device, [2, 2]) : null,
		);

	/** Names in order; "|" is where backward ends and draining begins. */
	function told(weightGradients: WeightGradients, layer: (tape: Tape, x: Tensor) => Tensor): string[] {
		const names: string[] = [];
		const onGradient = ({ name }: Parameter) => void names.push(name);
		const tape = new Tape(device, { recording: true, onGradient });
		using plain = Tensor.from(device, randomValues(4, 2), [2, 2]);
		using x = plain.withGradient(new GradientSlot(device, [2, 2], "f32"));
		using y = layer(tape, x);
		y.gradient!.accumulate(Tensor.from(device, randomValues(4, 3), [2, 2]));
		tape.backward(weightGradients);
		names.push("|");
		tape.drain();
		x.gradient!.clear();
		return names;
	}

	test("are told last layer first, a parameter used twice once, frozen ones never", () => {
		using first = weightOf("first");
		using second = weightOf("second");
		using frozen = weightOf("frozen", false);
		const layers = (tape: Tape, x: Tensor) => {
			using a = linear(tape, x, first);
			using b = linear(tape, a, second);
			using c = linear(tape, b, frozen);
			return linear(tape, c, second);
		};
		expect(told("immediate", layers)).toEqual(["second", "first", "|"]);
		expect(told("late", layers)).toEqual(["|", "second", "first"]);
		// Recomputed layers tell when their second forward has gone backward.
		const recomputed = (tape: Tape, x: Tensor) => {
			using a = recompute(tape, x, (again, value) => linear(again, value, first));
			return linear(tape, a, second);
		};
		expect(told("immediate", recomputed)).toEqual(["second", "first", "|"]);
		expect(told("late", recomputed)).toEqual(["|", "second", "first"]);
	});

	test("are told after the last of several recomputed layers with one parameter", () => {
		using shared = weightOf("shared");
		using other = weightOf("other");
		using norm = new Parameter("norm", Tensor.from(device, randomValues(2, 1), [2]), Tensor.zeros(device, [2]));
		const layer = (tape: Tape, x: Tensor) =>
			recompute(tape, x, (again, value) => {
				using normed = rmsNorm(again, value, norm, 1e-5);
				return linear(again, normed, shared);
			});
		const layers = (tape: Tape, x: Tensor) => {
			using a = layer(tape, x);
			using b = linear(tape, a, other);
			return layer(tape, b);
		};
		expect(told("immediate", layers)).toEqual(["other", "shared", "norm", "|"]);
		// The norm's gradient is never late: its kernel computes that of its input too.
		expect(told("late", layers)).toEqual(["norm", "|", "other", "shared"]);
	});
});
