/** How results are judged: tolerance, noise, copies, flips, ZeRO-1. */
import { expect, test } from "bun:test";
import type { LayoutResult } from "../../../src/parity/verify/layout-run.ts";
import type { Reference } from "../../../src/parity/verify/reference.ts";
import { judge, worst } from "../../../src/parity/verify/verdict.ts";

const scalars = {
	...{ loss: 2, losses: { "mtp_1 loss": 3 }, tokens: 100, gradientNorm: 4 },
	balancing: { seq_load_balancing_loss: 1 },
};
const reference: Reference = {
	microBatchSize: 1,
	microbatches: 4,
	scalars,
	noise: [scalars, { ...scalars, loss: 2 * (1 + 1e-7) }],
	noiseFlips: 0,
	recipe: "plain",
	operands: [],
	clamp: null,
	clipFactor: 1,
	tensors: [
		{ name: "quiet", elements: 4, rms: { gradient: 2, updated: 1, stepped: 1 }, noise: 0 },
		{ name: "noisy", elements: 4, rms: { gradient: 2, updated: 1, stepped: 1 }, noise: 4e-5 },
		{ name: "zero", elements: 4, rms: { gradient: 0, updated: 1, stepped: 1 }, noise: 0 },
	],
};
const equal = { rms: 0, copies: 0, different: 0 };

function result(
	change: Partial<LayoutResult>,
	gradients: readonly (readonly [rms: number, copies: number])[] = [],
): LayoutResult {
	return {
		scalars,
		differences: {
			gradient: reference.tensors.map((_, at) => {
				const [rms, copies] = gradients[at] ?? [0, 0];
				return { rms, copies, different: 0 };
			}),
			updated: [equal, equal, equal],
			stepped: [equal, equal, equal],
		},
		zero: { gradients: 0, weights: 0 },
		reordered: null,
		flips: { count: 0, first: [] },
		operands: null,
		clampFlips: { count: 0, first: null },
		participants: { counted: 2, expected: 2 },
		seconds: 1,
		...change,
	};
}
const failures = (...args: Parameters<typeof result>) => judge(result(...args), reference, 1e-5).failures;

test("a result equal to the reference holds", () => expect(failures({})).toEqual([]));

test("a gradient may differ by the tolerance of its rms and no more", () => {
	expect(failures({}, [[2 * 0.99e-5, 0]])).toEqual([]);
	expect(failures({}, [[2 * 1.1e-5, 0]])).toEqual(["the gradient of quiet is off by 1.1e-5 (limit 1.0e-5)"]);
});

test("three times the noise of a tensor is allowed it, not another", () => {
	expect(
		failures({}, [
			[0, 0],
			[1.1e-4, 0],
		]),
	).toEqual([]);
	expect(
		failures({}, [
			[0, 0],
			[1.3e-4, 0],
		]),
	).toEqual(["the gradient of noisy is off by 6.5e-5 (limit 6.0e-5)"]);
	expect(failures({}, [[1.1e-4, 0]])).toHaveLength(1);
});

test("noise allows 1e-4 at most, and the limits that it raises are told", () => {
	const loud = { ...reference, tensors: reference.tensors.map((tensor) => ({ ...tensor, noise: 2e-2 })) };
	const off = (error: number) => judge(result({}, [[2 * error, 0]]), loud, 1e-5).failures;
	expect(off(0.9e-4)).toEqual([]);
	expect(off(1.1e-4)).toEqual([
		"the gradient of quiet is off by 1.1e-4 (limit 1.0e-4); rounding alone changes it by 1.0e-2: its terms cancel",
	]);
	expect(off(3.1e-2)).toEqual(["the gradient of quiet is off by 3.1e-2 (limit 1.0e-4)"]);
	expect(judge(result({}), reference, 1e-5).raised.map(({ name, limit }) => [name, limit])).toEqual([
		["noisy", 3 * 2e-5],
	]);
});

test("a copy on another rank must agree too", () => {
	expect(failures({}, [[0, 1]])).toEqual(["the gradient of quiet is off by 5.0e-1 (limit 1.0e-5)"]);
});

test("of zeros nothing may differ", () => {
	expect(
		failures({}, [
			[0, 0],
			[0, 0],
			[1e-30, 0],
		])[0],
	).toMatch(/^the gradient of zero is off by Inf/);
});

test("what is not a number never holds", () => {
	expect(failures({}, [[Number.NaN, 0]])).toHaveLength(1);
	expect(failures({ scalars: { ...scalars, loss: Number.NaN } })).toHaveLength(1);
	const { gradients } = judge(
		result({}, [
			[0, 0],
			[Number.NaN, 0],
		]),
		reference,
		1e-5,
	);
	expect(worst(gradients)!.name).toBe("noisy");
});

test("numbers and the count of tokens are compared", () => {
	expect(failures({ scalars: { ...scalars, loss: 2.001 } })).toEqual(["loss is off by 5.0e-4 (limit 1.0e-5)"]);
	expect(failures({ participants: { counted: 1, expected: 2 } })).toEqual([
		"it counts 1 encoder rank with images instead of 2",
	]);
	expect(failures({ scalars: { ...scalars, tokens: 99 } })).toEqual(["it counts 99 loss tokens instead of 100"]);
	expect(failures({ scalars: { ...scalars, balancing: {} } })[0]).toMatch(/^seq_load_balancing_loss is off by NaN/);
});

test("flips, ZeRO-1 and late weight gradients are named", () => {
	const first = [
		{ layer: 4, token: 3, experts: [1, 2], reference: [1, 3] },
		{ layer: 2, token: 9, experts: [0, 7], reference: [0, 5] },
	];
	expect(failures({ flips: { count: 2, first } })[0]).toStartWith(
		"2 routing decisions flip, first in layer 2: token 9 of the batch goes to experts 0, 7 instead of 0, 5;",
	);
	expect(failures({ zero: { gradients: 0, weights: 3 } })).toEqual(["ZeRO-1 changes 3 elements of the weights"]);
	expect(failures({ reordered: { what: "late weight gradients", gradients: 2, weights: 0 } })).toEqual([
		"late weight gradients change 2 elements of the gradients",
	]);
});

test("the noisiest run decides how much is allowed", () => {
	const noise = [1e-6, 1e-5, 0].map((share) => ({ ...scalars, loss: 2 * (1 + share) }));
	const failuresAt = (loss: number) =>
		judge(result({ scalars: { ...scalars, loss } }), { ...reference, noise }, 1e-5).failures;
	expect(failuresAt(2 * (1 + 2.9e-5))).toEqual([]);
	expect(failuresAt(2 * (1 + 3.1e-5))).toEqual(["loss is off by 3.1e-5 (limit 3.0e-5)"]);
});

test("where rounding flips routing in every run, the tolerance alone is allowed", () => {
	const flipped = { ...reference, noiseFlips: 1, noise: [] };
	const verdict = judge(result({ scalars: { ...scalars, loss: 2.001 } }), flipped, 1e-5);
	expect(verdict.failures).toEqual(["loss is off by 5.0e-4 (limit 1.0e-5)"]);
});

test("losses beside the language model's are compared, also ones that only the layout has", () => {
	const losses = (found: Readonly<Record<string, number>>) => failures({ scalars: { ...scalars, losses: found } });
	expect(losses({ "mtp_1 loss": 6 })).toEqual(["mtp_1 loss is off by 1.0e+0 (limit 1.0e-5)"]);
	expect(losses({})).toEqual(["mtp_1 loss is off by NaN (limit 1.0e-5)"]);
	expect(losses({ ...scalars.losses, "budget loss": 1 })[0]).toStartWith("budget loss is off by");
});

test("what experts round is compared, and its ties are told without a failure", () => {
	const rounded = { ...reference, operands: [{ name: "the input of experts in layer.1", noise: 1e-7 }] };
	const first = [{ operand: "the input of experts in layer.1", token: 3, column: 9 }];
	const judged = (error: number) =>
		judge(result({ operands: { errors: [error], ties: { count: 2, first } } }), rounded, 1e-5);
	expect(judged(0.9e-5).failures).toEqual([]);
	expect(judged(0.9e-5).ties[0]).toStartWith(
		"2 values round to another e4m3 number than the reference's, such as column 9 of token 3 of the batch of the input of experts in layer.1;",
	);
	expect(judged(1.1e-5).failures).toEqual(["the input of experts in layer.1 is off by 1.1e-5 (limit 1.0e-5)"]);
	expect(judge(result({}), rounded, 1e-5).failures).toEqual([
		"the input of experts in layer.1 is off by NaN (limit 1.0e-5)",
	]);
});
