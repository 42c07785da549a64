import { describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { ExpertOrder, permute, unpermute } from "../../src/tensor/ops/permute.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues } from "../support.ts";
import { openDevices } from "./devices.ts";

let device: Device;
let single: Device;
openDevices((two, one) => {
	[device, single] = [two, one];
});

/** Expert choices [T, K]: ascending and distinct per token, about one slot in six dropped. */
function randomChoices(tokens: number, topk: number, experts: number, seed: number): Int32Array {
	const noise = randomValues(tokens * experts, seed);
	const drops = randomValues(tokens * topk, seed + 1);
	const choices = Array.from({ length: tokens }, (_, t) => {
		const row = noise.subarray(t * experts, (t + 1) * experts);
		const best = [...row.keys()].sort((a, b) => row[b]! - row[a]!).slice(0, topk);
		return best.sort((a, b) => a - b);
	});
	return Int32Array.from(choices.flat(), (e, slot) => (drops[slot]! > 0.7 ? -1 : e));
}

/** Slots of every expert in order, one expert after the other. */
function referenceOrder(choices: Int32Array, experts: number): number[][] {
	return Array.from({ length: experts }, (_, e) => [...choices.keys()].filter((slot) => choices[slot] === e));
}

function orderOf(on: Device, choices: Int32Array, topk: number, experts: number): ExpertOrder {
	using index = Tensor.from(on, choices, [choices.length / topk, topk]);
	return ExpertOrder.of(on, index, experts);
}

const cases: [string, Int32Array, number, number][] = [
	["random, some dropped", randomChoices(30, 3, 7, 1), 3, 7],
	["more slots than one run of the sort", randomChoices(6000, 3, 5, 2), 3, 5],
	["every expert of a token", Int32Array.from({ length: 4 * 3 }, (_, i) => i % 3), 3, 3],
	["all tokens on one expert", new Int32Array(9).fill(2), 1, 4],
	["all dropped", new Int32Array(10).fill(-1), 2, 4],
	["zero tokens", new Int32Array(0), 2, 4],
];

describe("ExpertOrder", () => {
	for (const [name, choices, topk, experts] of cases) {
		test(name, () => {
			for (const on of [device, single]) {
				using order = orderOf(on, choices, topk, experts);
				const expected = referenceOrder(choices, experts);
				const rows = expected.flat();
				let total = 0;
				expect([...order.offsets.toInt32()]).toEqual([0, ...expected.map((slots) => (total += slots.length))]);
				expect(order.rowCount.item()).toBe(rows.length);
				expect([...order.slotOfRow.toInt32().subarray(0, rows.length)]).toEqual(rows);
				const rowOfSlot = new Int32Array(choices.length).fill(-1);
				for (const [row, slot] of rows.entries()) rowOfSlot[slot] = row;
				expect(order.rowOfSlot.toInt32()).toEqual(rowOfSlot);
			}
		});
	}

	test("an index beyond the last expert drops its slot", () => {
		using order = orderOf(device, Int32Array.of(1, 4, 0, 1), 2, 2);
		expect([...order.rowOfSlot.toInt32()]).toEqual([1, -1, 0, 2]);
	});
});

describe("permute and unpermute", () => {
	for (const [name, choices, topk, experts] of cases.filter(([, choices]) => choices.length < 1000)) {
		const tokens = choices.length / topk;
		const slots = referenceOrder(choices, experts).flat();
		const x = (width: number) => ({ values: randomValues(tokens * width, 3), shape: [tokens, width] });

		test(`${name}: rows come back summed`, () => {
			const width = 5;
			checkGradients(device, {
				inputs: { x: x(width) },
				forward: (tape, { x }) => {
					using order = orderOf(device, choices, topk, experts);
					using probabilities = Tensor.zeros(device, [tokens, topk]);
					const { rows, rowProbability } = permute(tape, x!, probabilities, order);
					rowProbability[Symbol.dispose]();
					using _rows = rows;
					expect(rows.rowCount).toBe(order.rowCount);
					return unpermute(tape, rows, order);
				},
				reference: ({ x }) => {
					const y = new Float64Array(x!.length);
					for (const slot of slots) {
						const token = Math.floor(slot / topk);
						for (let i = 0; i < width; i++) y[token * width + i]! += x![token * width + i]!;
					}
					return y;
				},
			});
		});

		test(`${name}: probabilities move with their slots, in both directions`, () => {
			using order = orderOf(device, choices, topk, experts);
			const values = randomValues(choices.length, 4);
			using plain = Tensor.from(device, values, [tokens, topk]);
			using probabilities = plain.withGradient(new GradientSlot(device, [tokens, topk], "f32"));
			using input = Tensor.from(device, x(2).values, [tokens, 2]);
			const tape = new Tape(device, { recording: true });
			const { rows, rowProbability } = permute(tape, input, probabilities, order);
			const live = [...rowProbability.toFloat32().subarray(0, slots.length)];
			expect(live).toEqual(slots.map((slot) => values[slot]!));
			const upstream = randomValues(choices.length, 5);
			rowProbability.gradient!.accumulate(Tensor.from(device, upstream));
			tape.backward();
			const expected = new Float32Array(choices.length);
			for (const [row, slot] of slots.entries()) expected[slot] = upstream[row]!;
			using gradient = probabilities.gradient!.take()!;
			expect(gradient.toFloat32()).toEqual(expected);
			rows[Symbol.dispose]();
			rowProbability[Symbol.dispose]();
		});
	}

	test("wide rows, bf16 storage: copies are exact, sums are rounded once; threads do not matter", () => {
		const [tokens, topk, experts, width] = [70, 3, 6, 1100];
		const choices = randomChoices(tokens, topk, experts, 6);
		const run = (on: Device) => {
			using order = orderOf(on, choices, topk, experts);
			using x = Tensor.from(on, randomValues(tokens * width, 7), [tokens, width], { dtype: "bf16" });
			using probabilities = Tensor.zeros(on, [tokens, topk]);
			const tape = new Tape(on, { recording: false });
			const { rows, rowProbability } = permute(tape, x, probabilities, order);
			const slots = referenceOrder(choices, experts).flat();
			const input = x.toFloat32();
			const copies = rows.toFloat32();
			for (const [row, slot] of slots.entries()) {
				const token = Math.floor(slot / topk);
				expect(copies.subarray(row * width, (row + 1) * width)).toEqual(
					input.subarray(token * width, (token + 1) * width),
				);
			}
			using y = unpermute(tape, rows, order);
			expect(y.dtype).toBe("bf16");
			rows[Symbol.dispose]();
			rowProbability[Symbol.dispose]();
			return { input, y: y.toFloat32() };
		};
		const { input, y } = run(device);
		const copies = Array.from({ length: tokens }, (_, t) =>
			choices.subarray(t * topk, (t + 1) * topk).reduce((count, e) => count + Number(e >= 0), 0),
		);
		using sums = Tensor.from(
			device,
			input.map((value, i) => value * copies[Math.floor(i / width)]!),
			[tokens, width],
			{ dtype: "bf16" },
		);
		expect(y).toEqual(sums.toFloat32());
		expect(run(single).y).toEqual(y);
	});
});
