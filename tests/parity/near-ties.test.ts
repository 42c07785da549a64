/** Near ties of a router are found, can be swapped, and a comparison takes them only where that makes values agree. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { RouterState } from "../../src/models/language/router-state.ts";
import type { Device } from "../../src/native/device.ts";
import type { Optimizer } from "../../src/optim/optimizer.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { renderReport } from "../../src/parity/comparison.ts";
import { type ComparedRun, compareSteps, type NearTie, NearTies } from "../../src/parity/resolve-ties.ts";
import { route } from "../../src/tensor/ops/router.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const experts = { "num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 8 };
const { moe } = hybridConfig(
	configurationOf({ preset: "nemotron-tiny", ...experts, "moe-router-bias-update-rate": 0 }),
);

/** Experts of three tokens; the second token's experts 0 and 3 differ by 1e-6 in their logits. */
function choose(swapped: readonly NearTie[]): { experts: number[][]; found: NearTie[] } {
	using router = new RouterState(device, moe, { tokenShards: 1, passes: 1 });
	const ties = new NearTies(0, swapped);
	ties.watch(new Map([[7, router]]));
	ties.startStep(4);
	const logits = [3, 2, 1, 0, 0.25, 1, -1, 0.250001, -1, 0.5, 0.1, 0.6];
	using tensor = Tensor.from(device, Float32Array.from(logits), [3, 4]);
	router.onLogits!(tensor);
	const tape = new Tape(device, { recording: false });
	using routing = route(tape, tensor, { topk: 2, scoreFunction: "sigmoid", expertBias: router.expertBias });
	const chosen = [...routing.expertIndex.toInt32()];
	return { experts: [chosen.slice(0, 2), chosen.slice(2, 4), chosen.slice(4, 6)], found: ties.found };
}

test("a near tie is found, and swapped when asked for", () => {
	const plain = choose([]);
	expect(plain.experts).toEqual([
		[0, 1],
		[1, 3],
		[1, 3],
	]);
	// Twice: for the choice of experts and for the balancing loss, which leaves the bias out.
	expect(plain.found).toHaveLength(2);
	expect(plain.found[0]).toMatchObject({ rank: 0, step: 4, layer: 7, pass: 0, token: 1, chosen: 3, leftOut: 0 });
	expect(plain.found[0]!.gap).toBeCloseTo(2.4e-7, 7);
	const swapped = choose([plain.found[0]!]);
	expect(swapped.experts).toEqual([
		[0, 1],
		[0, 1],
		[1, 3],
	]);
});

/**
 * A training whose every step routes the three tokens above and adds one to a number, and its own number (from 1) times
 * a thousand where the second token goes to expert 0. `off`: whether a step (from 0) disagrees with the reference at the
 * number it leaves.
 */
function training(steps: number, off: (step: number, value: number) => boolean) {
	const router = new RouterState(device, moe, { tokenShards: 1, passes: 1 });
	const scalars = new StepScalars(device);
	const trained: number[] = [];
	const run: ComparedRun = {
		folder: "x",
		steps,
		precision: "f32",
		state: { replicas: [], language: null, optimizer: { shards: [] } as unknown as Optimizer, scalars },
		routers: new Map([[7, router]]),
		step: (step) => {
			trained.push(step);
			using logits = Tensor.from(
				device,
				Float32Array.from([3, 2, 1, 0, 0.25, 1, -1, 0.250001, -1, 0.5, 0.1, 0.6]),
				[3, 4],
			);
			router.onLogits!(logits);
			using routing = route(new Tape(device, { recording: false }), logits, { topk: 2, scoreFunction: "sigmoid" });
			const swapped = routing.expertIndex.toInt32()[2] === 0;
			const value = scalars.step.toInt32()[0]! + 1 + (swapped ? 1000 * (step + 1) : 0);
			scalars.setStep(value);
			const error = off(step, value) ? 1 : 0;
			return [{ name: `step ${step + 1} loss`, expected: 1, actual: 1 + error, error, limit: 0.5 }];
		},
	};
	const report = compareSteps(0, (own) => own, run);
	for (const one of [router, scalars]) one[Symbol.dispose]();
	return { report, trained, failed: report.checks.filter(({ error }) => error > 0).map(({ name }) => name) };
}

const third = "step 3, layer 7, token 1 of pass 0 on rank 0: expert 0 rather than 3, whose scores differ by 2.5e-7";

/** The record of a reference that took the near tie of step `at` the other way. */
const otherwise = (at: number) => (step: number) => step + 1 + (step < at ? 0 : 1000 * (at + 1));

test("a comparison takes a near tie as the reference did, and says so", () => {
	const reference = otherwise(2);
	const { report, trained, failed } = training(5, (step, value) => value !== reference(step));
	expect(failed).toEqual([]);
	expect(report.ties).toEqual([third]);
	expect(trained).toEqual([0, 1, 2, 2, 3, 4]);
});

test("a near tie whose difference shows later is found by going back", () => {
	const reference = otherwise(2);
	const { report, trained, failed } = training(18, (step, value) => step >= 6 && value !== reference(step));
	expect(failed).toEqual([]);
	expect(report.ties).toEqual([third]);
	const range = (first: number, last: number) => Array.from({ length: last - first + 1 }, (_, i) => first + i);
	// Before step 3 (from 0) only the first snapshot is kept.
	const tries = [6, 5, 4, 3, 0].flatMap((first) => range(first, 6));
	expect(trained).toEqual([...range(0, 6), ...tries, ...range(7, 17)]);
});

test("a difference that no near tie explains is told in twice the time, with all steps", () => {
	const steps = 24;
	const { report, trained, failed } = training(steps, (step) => step >= 12);
	expect(report.ties).toBeUndefined();
	expect(failed).toHaveLength(12);
	expect(report.checks).toHaveLength(steps);
	expect(trained.length).toBeLessThanOrEqual(2 * steps);
	// The last steps' states are those that the untouched training left.
	expect(trained.slice(-11)).toEqual([13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]);
	expect(report.search!.tried).toBeGreaterThan(2);
	expect(renderReport(report)).toMatch(
		/^No routing decision explains the first difference: \d+ .* \d+ more were not tried\.$/m,
	);
	expect(renderReport(report)).toContain("FAILED, first at step 13 loss");
});

test("going back restores what a step changed", () => {
	const values: number[] = [];
	training(6, (step, value) => {
		if (step >= 3) values.push(value);
		return step === 3;
	});
	// Step 4 as it was; with ties of steps 4, 3 and on swapped; then steps 5 and 6 after the untouched one.
	expect(values[0]).toBe(4);
	expect(values[1]).toBe(4004);
	expect(values.slice(-2)).toEqual([5, 6]);
});
