import { test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { headNorm } from "../../src/tensor/ops/head-norm.ts";
import { checkGradients, randomValues } from "../support.ts";
import { openDevices } from "./devices.ts";

let device: Device;
openDevices((two) => {
	device = two;
});

const epsilon = 1e-5;

/** The formula of docs/spec/families.md §2.3, in float64; values pass. */
function reference(x: Float64Array, query: Float64Array, key: Float64Array, heads: number): Float64Array {
	const d = query.length;
	return x.map((value, index) => {
		const head = Math.floor(index / d) % heads;
		if (head === heads - 1) return value;
		const first = index - (index % d);
		const squares = x.subarray(first, first + d).reduce((sum, one) => sum + one * one, 0);
		const weight = head === heads - 2 ? key : query;
		return (value / Math.sqrt(squares / d + epsilon)) * weight[index % d]!;
	});
}

test.each([
	[4, 2, 6, 5, false],
	[4, 2, 6, 5, true],
	[3, 1, 8, 2, false],
	[2, 2, 4, 1, false],
	[2, 1, 4, 0, false],
])(
	"%d query heads, %d key heads of %d columns, %d tokens, zero-centred %p",
	(queryHeads, keyHeads, headDim, tokens, zeroCentred) => {
		const heads = queryHeads / keyHeads + 2;
		const width = keyHeads * heads * headDim;
		checkGradients(device, {
			inputs: { qkv: { values: randomValues(tokens * width, 1), shape: [tokens, width] } },
			parameters: {
				query: { values: randomValues(headDim, 2), shape: [headDim] },
				key: { values: randomValues(headDim, 3), shape: [headDim] },
			},
			forward: (tape, { qkv }, { query, key }) =>
				headNorm(tape, qkv!, { ...{ queryHeads, keyHeads, headDim, epsilon, zeroCentred }, query: query!, key: key! }),
			reference: ({ qkv, query, key }) => {
				const gain = (weight: Float64Array) => weight.map((gamma) => gamma + Number(zeroCentred));
				return reference(qkv!, gain(query!), gain(key!), heads);
			},
		});
	},
);
