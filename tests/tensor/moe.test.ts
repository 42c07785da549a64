/** The operations of a mixture of experts together, against a dense float64 reference without permutations. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { activation } from "../../src/tensor/ops/activation.ts";
import { groupedLinear } from "../../src/tensor/ops/grouped-linear.ts";
import { linear } from "../../src/tensor/ops/linear.ts";
import { ExpertOrder, permute, unpermute } from "../../src/tensor/ops/permute.ts";
import { balancingLoss, route } from "../../src/tensor/ops/router.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";
import { referenceRouting } from "./router-reference.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const [hidden, ffn, experts, topk, scalingFactor] = [6, 7, 5, 2, 2.5];
/** Expert 3 is never chosen, expert 0 always. */
const bias = Float32Array.of(2, 0, 0.1, -2, 0);

type Weights = Readonly<Record<"router" | "fc1" | "fc2", Parameter>>;

/** One microbatch through the experts, in the segments of docs/spec/moe-performance.md §2.1. */
function mixture(tape: Tape, x: Tensor, weights: Weights, balance: number): Tensor {
	using sequences = Sequences.of(tape.device, [x.rows]);
	using expertBias = Tensor.from(tape.device, bias);
	tape.begin("pre_dispatch");
	using logits = linear(tape, x, weights.router);
	using routing = route(tape, logits, {
		topk,
		scoreFunction: "sigmoid",
		scalingFactor,
		expertBias,
		statistics: sequences,
	});
	balancingLoss(tape, routing.statistics!, { coefficient: 1, gradientScale: balance });
	using order = ExpertOrder.of(tape.device, routing.expertIndex, experts);
	tape.begin("dispatch");
	const permuted = permute(tape, x, routing.probabilities, order);
	using rows = permuted.rows;
	using rowProbability = permuted.rowProbability;
	tape.begin("experts");
	using u = groupedLinear(tape, rows, weights.fc1, order.offsets);
	using v = activation(tape, u, "squaredRelu", { rowProbability });
	using y = groupedLinear(tape, v, weights.fc2, order.offsets);
	tape.begin("combine");
	return unpermute(tape, y, order);
}

function dense(values: Record<string, Float64Array>): Float64Array {
	const { x, router, fc1, fc2 } = values as Record<"x" | "router" | "fc1" | "fc2", Float64Array>;
	const tokens = x.length / hidden;
	const product = (w: Float64Array, from: number, rows: number, input: Float64Array) =>
		Float64Array.from({ length: rows }, (_, o) =>
			input.reduce((sum, value, i) => sum + value * w[from + o * input.length + i]!, 0),
		);
	const inputs = Array.from({ length: tokens }, (_, t) => x.subarray(t * hidden, (t + 1) * hidden));
	const logits = Float64Array.from(inputs.flatMap((u) => [...product(router, 0, experts, u)]));
	const { index, probabilities } = referenceRouting(logits, experts, {
		topk,
		scoreFunction: "sigmoid",
		scalingFactor,
		bias,
	});
	const y = new Float64Array(x.length);
	for (const [t, u] of inputs.entries()) {
		for (const [k, e] of index[t]!.entries()) {
			const act = product(fc1, e * ffn * hidden, ffn, u).map((value) => Math.max(value, 0) ** 2);
			const out = product(fc2, e * ffn * hidden, hidden, act);
			for (let i = 0; i < hidden; i++) y[t * hidden + i]! += probabilities[t * topk + k]! * out[i]!;
		}
	}
	return y;
}

const shapes = { router: [experts, hidden], fc1: [experts, ffn, hidden], fc2: [experts, hidden, ffn] } as const;
const initial = {
	router: randomValues(experts * hidden, 11),
	fc1: randomValues(experts * ffn * hidden, 12),
	fc2: randomValues(experts * ffn * hidden, 13),
};

describe("a mixture of experts", () => {
	for (const tokens of [1, 13]) {
		test(`output and every gradient, ${tokens} tokens`, () => {
			checkGradients(device, {
				inputs: { x: { values: randomValues(tokens * hidden, 10), shape: [tokens, hidden] } },
				parameters: {
					router: { values: initial.router, shape: shapes.router },
					fc1: { values: initial.fc1, shape: shapes.fc1 },
					fc2: { values: initial.fc2, shape: shapes.fc2 },
				},
				forward: (tape, { x }, w) => mixture(tape, x!, w as Weights, 0),
				reference: dense,
			});
		});
	}

	test("zero tokens run forward and backward and leave every weight gradient at zero", () => {
		const { gradients, inputGradients } = train(
			2,
			(tapes) => {
				for (const tape of tapes) tape.backward();
			},
			[0, 0],
		);
		for (const gradient of gradients) expect(gradient.every((value) => value === 0)).toBe(true);
		expect(inputGradients.map((gradient) => gradient.length)).toEqual([0, 0]);
	});

	/** Two microbatches forward, then backward as `schedule` orders it; gradients of weights and inputs. */
	function train(count: number, schedule: (tapes: Tape[]) => void, tokens: readonly number[] = [13, 9]) {
		const before = device.memoryStatistics().liveBytes;
		const weights = Object.fromEntries(
			(["router", "fc1", "fc2"] as const).map((name) => [
				name,
				new Parameter(name, Tensor.from(device, initial[name], shapes[name]), Tensor.zeros(device, shapes[name])),
			]),
		) as Weights;
		const tapes: Tape[] = [];
		const inputs: Tensor[] = [];
		for (let i = 0; i < count; i++) {
			const shape = [tokens[i]!, hidden];
			using plain = Tensor.from(device, randomValues(tokens[i]! * hidden, 20 + i), shape);
			const x = plain.withGradient(new GradientSlot(device, shape, "f32"));
			const tape = new Tape(device, { recording: true });
			using y = mixture(tape, x, weights, 0.3);
			y.gradient!.accumulate(Tensor.from(device, randomValues(tokens[i]! * hidden, 30 + i), shape));
			tapes.push(tape);
			inputs.push(x);
		}
		schedule(tapes);
		const gradients = Object.values(weights).map((weight) => weight.mainGradient!.toFloat32());
		const inputGradients = inputs.map((x) => {
			using gradient = x.gradient!.take();
			return gradient ? gradient.toFloat32() : new Float32Array();
		});
		for (const tensor of [...inputs, ...Object.values(weights)]) tensor[Symbol.dispose]();
		expect(device.memoryStatistics().liveBytes).toBe(before);
		return { gradients, inputGradients };
	}

	test("two interleaved microbatches with late weight gradients give the gradients of one after the other", () => {
		const expected = train(2, (tapes) => {
			for (const tape of tapes) tape.backward();
		});
		const interleaved = train(2, ([a, b]) => {
			// Segment by segment, the two in turn; then all weight gradients, in the order of the microbatches.
			for (let i = a!.segments.length - 1; i >= 0; i--) {
				b!.backwardSegment(b!.segments[i]!, "late");
				a!.backwardSegment(a!.segments[i]!, "late");
			}
			for (const tape of [a!, b!]) tape.drain();
		});
		expect(interleaved).toEqual(expected);
		expect(expected.gradients.every((gradient) => gradient.some((value) => value !== 0))).toBe(true);
	});

	test("late weight gradients stay at zero until they are drained", () => {
		let tasks = 0;
		const { gradients } = train(
			1,
			([tape]) => {
				tape!.backward("late");
				tasks = tape!.segments.reduce((count, segment) => count + segment.tasks.length, 0);
				tape!.discard();
			},
			[13],
		);
		expect(tasks).toBe(3);
		for (const gradient of gradients) expect(gradient.every((value) => value === 0)).toBe(true);
	});
});
