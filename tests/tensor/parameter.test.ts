/** A gradient that is zero without zeros in its memory: the first product writes it, and no other operation sees it before. */
import { afterAll, describe, expect, test } from "bun:test";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { embedding } from "../../src/tensor/ops/embedding.ts";
import { groupedLinear } from "../../src/tensor/ops/grouped-linear.ts";
import { columnSum, linear } from "../../src/tensor/ops/linear.ts";
import { SparseMatrix, spmm } from "../../src/tensor/ops/spmm.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape, type WeightGradients } from "../../src/tensor/tape.ts";
import { elementCount, type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice, testLibrary } from "../support.ts";

const device = await testDevice(2);
/** cuBLAS may add in another order where it writes. */
const exact = (await testLibrary()).kind === "cpu";
afterAll(() => device[Symbol.dispose]());

/** A parameter whose gradient is zero while its memory holds NaN, or zeros. */
function parameterOf(shape: readonly number[], memory: "zeros" | "NaN", dtype: FloatDtype = "f32"): Parameter {
	const values = randomValues(elementCount(shape), 5);
	const gradient = new Float32Array(elementCount(shape)).fill(memory === "NaN" ? Number.NaN : 0);
	const parameter = new Parameter(
		"w",
		Tensor.from(device, values, shape, { dtype }),
		Tensor.from(device, gradient, shape),
	);
	if (memory === "NaN") parameter.forgetGradient();
	return parameter;
}

describe("a forgotten gradient", () => {
	test("reads as zeros", () => {
		using w = parameterOf([3, 5], "NaN");
		expect(w.mainGradient!.toFloat32()).toEqual(new Float32Array(15));
	});

	test("is written once, then added to", () => {
		using w = parameterOf([3, 5], "NaN");
		const told: boolean[] = [];
		for (let i = 0; i < 3; i++) w.addToGradient((_, accumulate) => void told.push(accumulate));
		expect(told).toEqual([false, true, true]);
		w.forgetGradient();
		w.addToGradient((_, accumulate) => void told.push(accumulate));
		expect(told.at(-1)).toBeFalse();
	});

	test("is added to where it has been read or settled", () => {
		for (const look of ["mainGradient", "settleGradient"] as const) {
			using w = parameterOf([3, 5], "NaN");
			if (look === "mainGradient") w.mainGradient;
			else w.settleGradient();
			w.addToGradient((into, accumulate) => {
				expect(accumulate).toBeTrue();
				expect(into.toFloat32()).toEqual(new Float32Array(15));
			});
		}
	});

	test("keeps its zeros when a product fails", () => {
		using w = parameterOf([3, 5], "NaN");
		const fail = () => {
			throw new Error("no memory");
		};
		expect(() => w.addToGradient(fail)).toThrow("no memory");
		expect(w.mainGradient!.toFloat32()).toEqual(new Float32Array(15));
	});

	test("of a frozen parameter is none", () => {
		using w = new Parameter("w", Tensor.zeros(device, [2, 2]), null);
		w.forgetGradient();
		w.settleGradient();
		expect(w.mainGradient).toBeNull();
		w.addToGradient(() => expect.unreachable());
	});
});

/** An operation of a parameter on rows of x; `own` disposes its further tensors. */
interface Use {
	readonly name: string;
	readonly weight: readonly number[];
	readonly width: number;
	readonly rows: number;
	readonly run: (tape: Tape, x: Tensor, w: Parameter, own: DisposableStack) => Tensor;
}

const sparse = {
	columns: 9,
	offsets: Int32Array.of(0, 2, 2, 5, 6),
	column: Int32Array.of(3, 0, 8, 8, 1, 5),
	value: randomValues(6, 8),
};
const uses: readonly Use[] = [
	{ name: "linear", weight: [70, 44], width: 44, rows: 130, run: (tape, x, w) => linear(tape, x, w) },
	{ name: "linear of small products", weight: [5, 3], width: 3, rows: 7, run: (tape, x, w) => linear(tape, x, w) },
	{ name: "linear of long sums", weight: [530, 24], width: 24, rows: 900, run: (tape, x, w) => linear(tape, x, w) },
	{
		name: "groupedLinear, experts without rows",
		weight: [5, 70, 44],
		width: 44,
		rows: 131,
		run: (tape, x, w, own) =>
			groupedLinear(tape, x, w, own.use(Tensor.from(device, Int32Array.of(0, 0, 100, 101, 101, 128)))),
	},
	{
		name: "groupedLinear, no rows at all",
		weight: [2, 70, 44],
		width: 44,
		rows: 3,
		run: (tape, x, w, own) => groupedLinear(tape, x, w, own.use(Tensor.from(device, Int32Array.of(0, 0, 0)))),
	},
	{
		name: "spmm, a table some of whose rows nobody reads",
		weight: [9, 20],
		width: 20,
		rows: 4,
		run: (tape, _, w, own) => spmm(tape, own.use(new SparseMatrix(device, sparse)), w),
	},
	{
		name: "embedding, then linear of the same table",
		weight: [60, 44],
		width: 44,
		rows: 30,
		run: (tape, _, w, own) => {
			const ids = own.use(
				Tensor.from(
					device,
					Int32Array.from({ length: 30 }, (_, i) => (i * 7) % 60),
				),
			);
			return linear(tape, own.use(embedding(tape, ids, w)), w, null, { weightGradientLate: false });
		},
	},
];

/** Gradient after each of two microbatches. */
function gradientsOf(use: Use, memory: "zeros" | "NaN", dtype: FloatDtype, weightGradients: WeightGradients) {
	using w = parameterOf(use.weight, memory, dtype);
	return [1, 2].map((microbatch) => {
		using own = new DisposableStack();
		const tape = new Tape(device, { recording: true });
		using plain = Tensor.from(device, randomValues(use.rows * use.width, microbatch), [use.rows, use.width], { dtype });
		using x = plain.withGradient(new GradientSlot(device, plain.shape, dtype));
		using y = use.run(tape, x, w, own);
		const dy = randomValues(y.elements, 10 + microbatch);
		y.gradient!.accumulate(Tensor.from(device, dy, y.shape, { dtype }));
		tape.backward(weightGradients);
		// The tensors that forward made may be gone before late weight gradients are computed.
		own.dispose();
		tape.drain();
		x.gradient!.clear();
		return w.mainGradient!.toFloat32();
	});
}

describe("written, then added to, is what zeros added to are, bit for bit", () => {
	for (const use of uses) {
		for (const dtype of ["f32", "bf16"] as const) {
			for (const weightGradients of ["immediate", "late"] as const) {
				test(`${use.name}, ${dtype}, ${weightGradients}`, () => {
					const before = device.memoryStatistics().liveBytes;
					const written = gradientsOf(use, "NaN", dtype, weightGradients);
					const added = gradientsOf(use, "zeros", dtype, weightGradients);
					if (exact) {
						// As bits: minus zero would show.
						const bits = (all: Float32Array[]) => all.map((values) => new Uint32Array(values.buffer));
						expect(bits(written)).toEqual(bits(added));
						// Late ones are the immediate ones.
						expect(bits(written)).toEqual(bits(gradientsOf(use, "NaN", dtype, "immediate")));
					} else {
						for (const [i, values] of written.entries()) expect(relativeRms(values, added[i]!)).toBeLessThan(1e-6);
					}
					expect(device.memoryStatistics().liveBytes).toBe(before);
				});
			}
		}
	}
});

test("an operation that only adds finds zeros", () => {
	using bias = parameterOf([6], "NaN");
	using dy = Tensor.from(device, new Float32Array(12).fill(1), [2, 6]);
	columnSum(device, dy, bias.mainGradient!);
	expect(bias.mainGradient!.toFloat32()).toEqual(new Float32Array(6).fill(2));
});
