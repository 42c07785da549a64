/** Rows in e4m3, rounded by the operation that writes them (docs/spec/moe-performance.md §1.7). */
import { afterAll, beforeAll, expect, spyOn, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { E4m3Rows } from "../../src/tensor/ops/e4m3.ts";
import { groupedMlp } from "../../src/tensor/ops/grouped-mlp.ts";
import { ExpertOrder, permute, unpermute } from "../../src/tensor/ops/permute.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { bytesOf, randomValues, testDevice } from "../support.ts";
import { codes, rounded, toE4m3 } from "./e4m3-reference.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const rows = (values: ArrayLike<number>, width: number) => rounded(values, width, 1);

test("rows are multiplied by the largest power of two that keeps them within the largest number", () => {
	for (const largest of [1, 448, 448.5, 3.5, 3.5001, 1e-3, 0]) {
		// The smallest values become subnormal numbers of e4m3, whose digits depend on the power.
		const values = Float32Array.from(
			{ length: 128 },
			(_, i) => (i % 2 === 0 ? 1 : -1) * Math.fround(largest * 0.93 ** i),
		);
		using x = Tensor.from(device, values, [1, 128]);
		using live = Tensor.from(device, Int32Array.of(1));
		using made = E4m3Rows.of(x, live);
		const power = largest === 0 ? 1 : 2 ** Math.floor(Math.log2(448 / values[0]!));
		expect(made.factors.toFloat32()[0]).toBe(1 / power);
		const numbers = [...bytesOf(made.values)].map((byte) => (byte >= 0x80 ? -1 : 1) * codes[byte & 0x7f]!);
		expect(numbers.map((number) => number + 0)).toEqual([...values].map((value) => toE4m3(value * power) + 0));
	}
});

const choices = Int32Array.of(0, 2, 1, -1, 0, 1, 2, 2, -1, 0);
/** Slots in expert order. */
const slots = [0, 4, 9, 2, 5, 1, 6, 7];
const [tokens, topk, experts] = [5, 2, 3];

function orderOfChoices(): ExpertOrder {
	using index = Tensor.from(device, choices, [tokens, topk]);
	return ExpertOrder.of(device, index, experts);
}

test("a permutation writes its rows in e4m3 too, or alone", () => {
	const width = 150;
	const stride = Math.ceil((tokens * topk) / 4) * 4;
	// Tokens of very different sizes, one of zeros and one with an infinity.
	const x = randomValues(tokens * width, 7).map(
		(value, i) => value * [1, 1e-4, 300, 0, 2][Math.floor(i / width) % tokens]!,
	);
	x[4 * width + 3] = Number.POSITIVE_INFINITY;
	using order = orderOfChoices();
	using input = Tensor.from(device, x, [tokens, width]);
	using probabilities = Tensor.from(device, new Float32Array(tokens * topk), [tokens, topk]);
	const tape = new Tape(device, { recording: false });
	const permuted = permute(tape, input, probabilities, order, { inE4m3: "beside" });
	using rowsBeside = permuted.rows;
	using _rowProbability = permuted.rowProbability;
	using inE4m3 = permuted.inE4m3!;
	expect(rowsBeside.dtype).toBe("f32");
	const bytes = bytesOf(inE4m3.values);
	const factors = inE4m3.factors.toFloat32();
	const permutedAlone = permute(tape, input, probabilities, order, { inE4m3: "alone" });
	using rowsAlone = permutedAlone.rows;
	using _probabilityAlone = permutedAlone.rowProbability;
	using alone = permutedAlone.inE4m3!;
	using roundedApart = E4m3Rows.of(rowsBeside, order.rowCount);
	const live = slots.length * width;
	for (const one of [alone, roundedApart]) {
		expect(bytesOf(one.values).subarray(0, live)).toEqual(bytes.subarray(0, live));
		for (let run = 0; run < 2; run++) {
			const of = (all: Float32Array) => all.subarray(run * stride, run * stride + slots.length);
			expect(of(one.factors.toFloat32())).toEqual(of(factors));
		}
	}
	expect(bytesOf(rowsAlone).subarray(0, live)).toEqual(bytes.subarray(0, live));
	const numberOf = (byte: number) => (byte & 0x80 ? -1 : 1) * (codes[byte & 0x7f] ?? Number.NaN);
	for (const [row, slot] of slots.entries()) {
		const token = Math.floor(slot / topk);
		const numbers = Float64Array.from({ length: width }, (_, i) => {
			return numberOf(bytes[row * width + i]!) * factors[Math.floor(i / 128) * stride + row]!;
		});
		const expected = rows(x.subarray(token * width, (token + 1) * width), width);
		// A run with an infinity is NaN, the one after it is not.
		if (token === 4) expected.fill(Number.NaN, 0, 128);
		expect([...numbers].map((value) => value + 0)).toEqual([...expected].map((value) => value + 0));
	}
});

for (const [dtype, weightGradientRecipe, biased] of [
	["f32", "plain", false],
	["bf16", "plain", false],
	["f32", "e4m3Blockwise", false],
	["bf16", "e4m3Blockwise", false],
	["bf16", "e4m3Blockwise", true],
] as const) {
	const form = weightGradientRecipe === "plain" || biased ? "beside" : "alone";
	const named = `${dtype}, weight gradients ${weightGradientRecipe}${biased ? ", biases" : ""}`;
	test(`experts compute the same bits from rows that were rounded where they were written, ${named}`, () => {
		const [hidden, width] = [160, 144];
		const calls = spyOn(device, "run");
		const pass = (before: boolean) => {
			calls.mockClear();
			const of = (seed: number, shape: readonly number[], scale: number) =>
				Tensor.from(device, randomValues(shape[0]! * shape[1]! * (shape[2] ?? 1), seed, scale), shape, { dtype });
			const parameter = (name: string, seed: number, shape: readonly number[]) =>
				new Parameter(name, of(seed, shape, 0.1), Tensor.zeros(device, shape));
			using fc1 = parameter("w1", 11, [experts, 2 * width, hidden]);
			using fc2 = parameter("w2", 12, [experts, hidden, width]);
			using fc1Bias = biased ? parameter("b1", 16, [experts, 2 * width]) : null;
			using fc2Bias = biased ? parameter("b2", 17, [experts, hidden]) : null;
			using order = orderOfChoices();
			using plainX = of(13, [tokens, hidden], 3);
			using x = plainX.withGradient(new GradientSlot(device, plainX.shape, dtype));
			using plainP = Tensor.from(device, randomValues(tokens * topk, 14), [tokens, topk]);
			using probabilities = plainP.withGradient(new GradientSlot(device, plainP.shape, "f32"));
			const tape = new Tape(device, { recording: true });
			const permuted = permute(tape, x, probabilities, order, { inE4m3: before ? form : null });
			const { rows, inE4m3, rowProbability } = permuted;
			const sorted = { rows, inE4m3, rowProbability, offsets: order.offsets };
			const options = { activation: "swiglu", recipe: "e4m3Blockwise", weightGradientRecipe } as const;
			const outputs = groupedMlp(tape, sorted, { fc1, fc2, fc1Bias, fc2Bias }, options);
			for (const one of [rows, inE4m3, rowProbability]) one?.[Symbol.dispose]();
			expect(outputs.gradient!.wantsE4m3).toBe(form);
			outputs.gradient!.wantsE4m3 = before ? form : null;
			using y = unpermute(tape, outputs, order);
			outputs[Symbol.dispose]();
			y.gradient!.accumulate(of(15, y.shape, 1));
			tape.backward();
			using dx = x.gradient!.take()!;
			using dp = probabilities.gradient!.take()!;
			const ran = (name: string) => calls.mock.calls.filter(([operation]) => operation === name);
			const given = [...ran("grouped_mlp_forward"), ...ran("grouped_mlp_backward")].map(([, args]) => {
				const { x, dy, x_e4m3, dy_e4m3 } = args as Record<"x" | "dy" | "x_e4m3" | "dy_e4m3", object | null | undefined>;
				return { asTheyAre: (x ?? dy ?? null) !== null, inE4m3: (x_e4m3 ?? dy_e4m3 ?? null) !== null };
			});
			const expected = { asTheyAre: form === "beside", inE4m3: before || form === "alone" };
			expect(given).toEqual([expected, expected]);
			expect(ran("e4m3_rows").length).toBe(form === "alone" && !before ? 2 : 0);
			const gradients = [fc1, fc2, fc1Bias, fc2Bias].flatMap((parameter) => parameter?.mainGradient ?? []);
			return [y, dx, dp, ...gradients].map((tensor) => bytesOf(tensor));
		};
		try {
			const live = device.memoryStatistics().liveBytes;
			const apart = pass(false);
			expect(pass(true)).toEqual(apart);
			expect(device.memoryStatistics().liveBytes).toBe(live);
		} finally {
			calls.mockRestore();
		}
	});
}

test("nothing is added to a gradient in e4m3 alone, which is not made where another has come before", () => {
	using order = orderOfChoices();
	const live = device.memoryStatistics().liveBytes;
	{
		using plain = Tensor.zeros(device, [tokens * topk, 160]);
		using outputs = plain.withGradient(new GradientSlot(device, plain.shape, "f32"));
		const slot = outputs.gradient!;
		slot.wantsE4m3 = "alone";
		const backward = () => {
			const tape = new Tape(device, { recording: true });
			using y = unpermute(tape, outputs, order);
			y.gradient!.accumulate(Tensor.zeros(device, y.shape));
			tape.backward();
		};
		slot.accumulate(Tensor.zeros(device, plain.shape));
		backward();
		expect(slot.takeE4m3()).toBeNull();
		slot.take()![Symbol.dispose]();
		backward();
		using more = Tensor.zeros(device, plain.shape);
		expect(() => slot.accumulate(more)).toThrow("came in e4m3 alone");
		slot.clear();
	}
	expect(device.memoryStatistics().liveBytes).toBe(live);
});

test("a second gradient is added, and what was rounded is dropped", () => {
	const slot = new GradientSlot(device, [3, 4], "f32");
	const live = device.memoryStatistics().liveBytes;
	const add = (inE4m3: E4m3Rows | null) => slot.accumulate(Tensor.zeros(device, [3, 4]), inE4m3);
	add(new E4m3Rows(device, 3, 4));
	slot.take()![Symbol.dispose]();
	slot.takeE4m3()![Symbol.dispose]();
	for (const second of [null, new E4m3Rows(device, 3, 4)]) {
		add(new E4m3Rows(device, 3, 4));
		add(second);
		expect(slot.takeE4m3()).toBeNull();
		slot.take()![Symbol.dispose]();
	}
	add(new E4m3Rows(device, 3, 4));
	slot.clear();
	expect(device.memoryStatistics().liveBytes).toBe(live);
});
