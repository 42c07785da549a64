import { expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import type { Key } from "../../src/config/schema.ts";
import { learningRateAt, type Schedules, schedulesOf, weightDecayAt } from "../../src/optim/schedules.ts";

function schedules(values: Partial<Record<Key, unknown>>): Schedules {
	return schedulesOf(
		configurationOf({
			"hybrid-layer-pattern": "-",
			"hidden-size": 8,
			"vocab-size": 8,
			"seq-length": 8,
			"micro-batch-size": 1,
			"global-batch-size": 8,
			lr: 1,
			...(values["train-samples"] === undefined ? { "train-iters": 100 } : {}),
			...values,
		}),
	);
}

/** Learning rates after 0, 1, … steps of 8 samples. */
function rates(values: Partial<Record<Key, unknown>>, steps: readonly number[]): number[] {
	const { learningRate } = schedules(values);
	return steps.map((step) => learningRateAt(learningRate, 8 * step));
}

function expectClose(actual: readonly number[], expected: readonly number[], digits = 12): void {
	expect(actual).toHaveLength(expected.length);
	actual.forEach((value, i) => {
		expect(value).toBeCloseTo(expected[i]!, digits);
	});
}

test("the 20-layer recipe's table", () => {
	const values = { lr: 2e-4, "min-lr": 2e-6, "lr-decay-style": "cosine", "lr-decay-iters": 10, "train-iters": 20 };
	const printed = rates(values, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 19]).map((rate) => rate.toExponential(6));
	expect(printed).toEqual([
		"2.000000e-4",
		"1.951546e-4",
		"1.810927e-4",
		"1.591907e-4",
		"1.315927e-4",
		"1.010000e-4",
		"7.040732e-5",
		"4.280926e-5",
		"2.090732e-5",
		"6.845405e-6",
		"2.000000e-6",
		"2.000000e-6",
		"2.000000e-6",
	]);
});

test("the warm-up is a straight line up to its last sample, and the decay begins there", () => {
	for (const style of ["linear", "cosine", "constant", "inverse-square-root"]) {
		const { learningRate } = schedules({ "lr-decay-style": style, "lr-warmup-iters": 10, "lr-warmup-init": 0.2 });
		expectClose(
			[0, 1, 40, 79, 80].map((samples) => learningRateAt(learningRate, samples)),
			[0.2, 0.21, 0.6, 0.99, 1],
		);
		expect(learningRateAt(learningRate, 81)).toBeWithin(0.9, style === "constant" ? 1.0000001 : 1);
	}
});

test("WSD: flat, then each anneal half way and at its end", () => {
	for (const [style, half] of [
		["linear", 0.5],
		["cosine", 0.5],
		["exponential", 0.41421356],
		["minus_sqrt", 0.29289322],
	] as const) {
		const values = { "lr-decay-style": "WSD", "lr-wsd-decay-style": style, "lr-wsd-decay-iters": 10 };
		expectClose(rates(values, [0, 50, 90, 95, 100, 101]), [1, 1, 1, half, 0, 0], 8);
	}
});

test("warm-up is linear from its first rate, whatever follows", () => {
	const warm = { "lr-warmup-iters": 4, "lr-warmup-init": 0.2 };
	for (const style of ["constant", "linear", "cosine", "inverse-square-root"]) {
		expectClose(rates({ ...warm, "lr-decay-style": style }, [0, 1, 2, 4]), [0.2, 0.4, 0.6, 1]);
	}
});

test("constant, linear and inverse square root", () => {
	expectClose(rates({ "lr-decay-style": "constant", "min-lr": 0.1 }, [0, 100, 101]), [1, 1, 1]);
	expectClose(rates({ "lr-decay-style": "linear", "min-lr": 0.2 }, [0, 50, 100, 101]), [1, 0.6, 0.2, 0.2]);
	const inverse = { "lr-decay-style": "inverse-square-root", "lr-warmup-iters": 4, "min-lr": 0.25 };
	// max·√W/√x with W = 32 samples; never below min-lr, and min-lr beyond the horizon.
	expectClose(rates(inverse, [4, 16, 36, 99, 101]), [1, 0.5, 1 / 3, 0.25, 0.25]);
	const { learningRate } = schedules({ "lr-decay-style": "inverse-square-root" });
	expectClose(
		[0, 1, 4].map((x) => learningRateAt(learningRate, x)),
		[1, 1, 0.5],
	);
});

test("the warm-up fraction is of the decay horizon and need not be whole samples", () => {
	const { learningRate } = schedules({ "lr-warmup-fraction": 0.013, "lr-decay-iters": 50 });
	expect(learningRate.warmupSamples).toBeCloseTo(5.2, 12);
	expect(learningRateAt(learningRate, 2.6)).toBeCloseTo(0.5, 12);
});

test("counting samples gives the same as counting steps", () => {
	const style = { "lr-decay-style": "WSD", "lr-wsd-decay-style": "linear" };
	const steps = schedules({ ...style, "lr-warmup-iters": 5, "lr-decay-iters": 50, "lr-wsd-decay-iters": 10 });
	const samples = schedules({
		...style,
		"train-samples": 807,
		"lr-warmup-samples": 40,
		"lr-decay-samples": 400,
		"lr-wsd-decay-samples": 80,
	});
	expect(samples.learningRate).toEqual(steps.learningRate);
	expect(samples.trainIterations).toBe(100);
	expect(samples.weightDecay.rampSamples).toBe(807);
});

test("weight decay: constant, linear and cosine ramps", () => {
	const at = (values: Partial<Record<Key, unknown>>) => {
		const { weightDecay } = schedules(values);
		return [0, 200, 400, 800, 801].map((x) => weightDecayAt(weightDecay, x));
	};
	expect(at({ "weight-decay": 0.05 })).toEqual([0.05, 0.05, 0.05, 0.05, 0.05]);
	const ramp = { "start-weight-decay": 0.1, "end-weight-decay": 0.5 };
	expectClose(at({ ...ramp, "weight-decay-incr-style": "linear" }), [0.1, 0.2, 0.3, 0.5, 0.5]);
	const quarter = 0.1 + (0.4 * (Math.cos(0.75 * Math.PI) + 1)) / 2;
	expectClose(at({ ...ramp, "weight-decay-incr-style": "cosine" }), [0.1, quarter, 0.3, 0.5, 0.5]);
});
