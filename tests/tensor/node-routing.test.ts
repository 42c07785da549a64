/** Nodes of tokens, experts of a node, and the gradients of routing on its way there and back. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { nodeExperts, tokenNodes } from "../../src/tensor/ops/node-routing.ts";
import { ExpertOrder, permute, permuteRows } from "../../src/tensor/ops/permute.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice(2);
});
afterAll(() => device[Symbol.dispose]());

const [tokens, topk, nodes, experts] = [300, 4, 3, 5];
/** Two choices may be equal, and some are dropped. */
const choices = Int32Array.from(randomValues(tokens * topk, 1), (value) => Math.floor(9.5 * value + 6));

test("a token goes once to each node that holds one of its experts, which finds them all", () => {
	const tape = new Tape(device, { recording: false });
	using expertIndex = Tensor.from(device, choices, [tokens, topk]);
	const weights = randomValues(tokens * topk, 2);
	using probabilities = Tensor.from(device, weights, [tokens, topk]);
	const found = tokenNodes(tape, { expertIndex, probabilities }, { nodes, nodeExperts: experts });
	using nodeIndex = found.nodeIndex;
	using routing = found.routing;
	const kept = (at: number) => choices[at]! >= 0 && choices[at]! < nodes * experts;
	const index = nodeIndex.toInt32();
	for (let token = 0; token < tokens; token++) {
		const slots = Array.from({ length: topk }, (_, k) => token * topk + k).filter(kept);
		const expected = [...new Set(slots.map((at) => Math.floor(choices[at]! / experts)))];
		while (expected.length < nodes) expected.push(-1);
		expect([...index.subarray(token * nodes, (token + 1) * nodes)]).toEqual(expected);
	}
	const live = 250;
	using rowCount = Tensor.from(device, Int32Array.of(live));
	for (let node = 0; node < nodes; node++) {
		const own = nodeExperts(tape, routing, { rowCount, firstExpert: node * experts, experts });
		using ownIndex = own.expertIndex;
		using ownWeights = own.probabilities;
		const here = (at: number) => at < live * topk && kept(at) && Math.floor(choices[at]! / experts) === node;
		const expected = choices.map((expert, at) => (here(at) ? expert - node * experts : -1));
		expect(ownIndex.toInt32()).toEqual(expected);
		expect(ownWeights.toFloat32()).toEqual(weights.map((weight, at) => (here(at) ? weight : 0)));
	}
});

/** Slots of a node's experts, by expert. */
function slotsOf(node: number): number[] {
	return Array.from({ length: experts }, (_, expert) =>
		[...choices.keys()].filter((at) => choices[at] === node * experts + expert),
	).flat();
}

test("probabilities reach the rows of a node's experts through its routing, and their gradients come back", () => {
	using expertIndex = Tensor.from(device, choices, [tokens, topk]);
	using rowCount = Tensor.from(device, Int32Array.of(tokens));
	using x = Tensor.zeros(device, [tokens, 1]);
	for (const node of [0, 2]) {
		const slots = slotsOf(node);
		checkGradients(device, {
			inputs: { probabilities: { values: randomValues(tokens * topk, 3), shape: [tokens, topk] } },
			forward: (tape, inputs) => {
				const routed = { expertIndex, probabilities: inputs.probabilities! };
				const found = tokenNodes(tape, routed, { nodes, nodeExperts: experts });
				using _nodeIndex = found.nodeIndex;
				using routing = found.routing;
				const own = nodeExperts(tape, routing, { rowCount, firstExpert: node * experts, experts });
				using ownIndex = own.expertIndex;
				using probabilities = own.probabilities;
				using order = ExpertOrder.of(device, ownIndex, experts);
				const { rows, rowProbability } = permute(tape, x, probabilities, order);
				using _rows = rows;
				using column = rowProbability;
				using live = column.columns(0, slots.length);
				return live.withGradient(column.gradient);
			},
			reference: ({ probabilities }) => Float64Array.from(slots, (at) => probabilities![at]!),
		});
	}
});

test("rows of two matrices go to the nodes, and their gradients come back as sums", () => {
	using expertIndex = Tensor.from(device, choices, [tokens, topk]);
	using weights = Tensor.zeros(device, [tokens, topk]);
	const tape = new Tape(device, { recording: false });
	const found = tokenNodes(tape, { expertIndex, probabilities: weights }, { nodes, nodeExperts: experts });
	using nodeIndex = found.nodeIndex;
	found.routing[Symbol.dispose]();
	using order = ExpertOrder.of(device, nodeIndex, nodes);
	const index = nodeIndex.toInt32();
	const rowsOf = Array.from({ length: nodes }, (_, node) =>
		[...index.keys()].filter((at) => index[at] === node).map((at) => Math.floor(at / nodes)),
	).flat();
	for (const wanted of [0, 1]) {
		checkGradients(device, {
			inputs: {
				a: { values: randomValues(tokens * 3, 4), shape: [tokens, 3] },
				b: { values: randomValues(tokens * 2, 5), shape: [tokens, 2] },
			},
			forward: (on, { a, b }) => {
				const both = permuteRows(on, [a!, b!], order);
				both[1 - wanted]![Symbol.dispose]();
				const rows = both[wanted]!;
				using _rows = rows;
				using live = rows.rowsFrom(0, rowsOf.length);
				return live.withGradient(rows.gradient);
			},
			reference: ({ a, b }) => {
				const [x, width] = wanted === 0 ? [a!, 3] : [b!, 2];
				return Float64Array.from(rowsOf.flatMap((token) => [...x.subarray(token * width, (token + 1) * width)]));
			},
		});
	}
});
