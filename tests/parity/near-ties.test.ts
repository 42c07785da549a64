/** Near ties of a router are found, can be swapped, and a comparison takes them only where that makes values agree. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { HybridConfig } from "../../src/models/hybrid/config.ts";
import { RouterState } from "../../src/models/hybrid/router-state.ts";
import type { Device } from "../../src/native/device.ts";
import type { ParityReport } from "../../src/parity/comparison.ts";
import { type NearTie, NearTies } from "../../src/parity/near-ties.ts";
import { resolveTies } from "../../src/parity/resolve-ties.ts";
import { route } from "../../src/tensor/ops/router.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const moe: HybridConfig["moe"] = {
	experts: 4,
	topk: 2,
	ffnHiddenSize: 8,
	sharedExpertSize: 0,
	scoreFunction: "sigmoid",
	preSoftmax: false,
	scalingFactor: 1,
	groups: 1,
	groupTopk: 1,
	groupScoreTopk: 1,
	expertBias: true,
	biasUpdateRate: 0,
	balancing: [],
	zLossCoefficient: 0,
};

/** Experts of three tokens; the second token's experts 0 and 3 differ by 1e-6 in their logits. */
function choose(swapped: readonly NearTie[]): { experts: number[][]; found: NearTie[] } {
	using router = new RouterState(device, moe, 1);
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

const tie: NearTie = { rank: 0, step: 2, layer: 1, pass: 0, token: 5, chosen: 3, leftOut: 6, gap: 1e-7 };

/** Step 3 agrees only when token 5 goes to expert 6; `other`: another value that never agrees. */
function reportOf(ties: NearTies, other: number): ParityReport {
	ties.found.push(tie, { ...tie, token: 9 });
	const error = ties.swapped.some(({ token }) => token === 5) ? 0 : 1;
	const check = (name: string, off: number) => ({ name, expected: 1, actual: 1 + off, error: off, limit: 0.5 });
	return { folder: "x", checks: [check("step 2 loss", 0), check("step 3 loss", error), check("step 4 loss", other)] };
}

test("a comparison takes a near tie as the reference did, and says so", async () => {
	const report = await resolveTies(
		0,
		(own) => own,
		async (ties) => reportOf(ties, 0),
	);
	expect(report.checks.every(({ error }) => error === 0)).toBeTrue();
	expect(report.ties).toEqual([
		"step 3, layer 1, token 5 of pass 0 on rank 0: expert 6 rather than 3, whose scores differ by 1.0e-7",
	]);
});

test("a difference that no near tie explains stays one", async () => {
	const report = await resolveTies(
		0,
		(own) => own,
		async (ties, steps = 9) => {
			const whole = reportOf(ties, 1);
			return { ...whole, checks: whole.checks.slice(0, steps - 1) };
		},
	);
	expect(report.checks.map(({ error }) => error)).toEqual([0, 0, 1]);
});
