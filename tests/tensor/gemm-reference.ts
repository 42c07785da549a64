/** Operands of matrix products in strided storage, and the products by float64 arithmetic. */
import type { Device } from "../../src/native/device.ts";
import { type FloatDtype, roundToBf16, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms } from "../support.ts";

export interface Case {
	readonly m: number;
	readonly n: number;
	readonly k: number;
	readonly batch?: number;
	readonly transposeA?: boolean;
	readonly transposeB?: boolean;
	readonly alpha?: number;
	readonly beta?: number;
	readonly bias?: boolean;
	/** Storage types of a, b and c. */
	readonly dtypes?: readonly [FloatDtype, FloatDtype, FloatDtype];
	/** Elements added to every row's stride and, twice, between matrices of the batch. */
	readonly gap?: number;
	/** All products of the batch read one b. */
	readonly sharedB?: boolean;
}

/** Matrices of a batch in strided storage; gaps hold NaN, so that reading one shows. */
class Operand {
	readonly stride: number;
	readonly batchStride: number;
	readonly values: Float32Array;

	constructor(
		readonly rows: number,
		readonly width: number,
		batch: number,
		readonly dtype: FloatDtype,
		gap: number,
		seed: number,
	) {
		this.stride = Math.max(1, width + gap);
		this.batchStride = rows * this.stride + 2 * gap;
		this.values = new Float32Array(batch * this.batchStride).fill(Number.NaN);
		const random = rounded(randomValues(batch * rows * width, seed), dtype);
		for (let row = 0; row < batch * rows; row++) {
			this.values.set(random.subarray(row * width, (row + 1) * width), this.offset(Math.floor(row / rows), row % rows));
		}
	}

	offset(index: number, row: number): number {
		return index * this.batchStride + row * this.stride;
	}
}

function rounded(values: Float32Array, dtype: FloatDtype): Float32Array {
	if (dtype === "f32") return values;
	return new Float32Array(Uint32Array.from(roundToBf16(values), (bits) => bits << 16).buffer);
}

export interface Operands {
	readonly a: Operand;
	readonly b: Operand;
	readonly c: Operand;
	readonly bias: Float32Array | null;
}

export function operandsOf(c: Case): Operands {
	const { m, n, k, batch = 1, gap = 0 } = c;
	const [aType, bType, cType] = c.dtypes ?? ["f32", "f32", "f32"];
	const out = new Operand(m, n, batch, cType, gap, 3);
	// With beta 0 the old contents must not be read.
	if ((c.beta ?? 0) === 0) out.values.fill(Number.NaN);
	return {
		a: new Operand(c.transposeA ? k : m, c.transposeA ? m : k, batch, aType, gap, 1),
		b: new Operand(c.transposeB ? n : k, c.transposeB ? k : n, c.sharedB ? 1 : batch, bType, gap, 2),
		c: out,
		bias: c.bias ? rounded(randomValues(n, 4), bType) : null,
	};
}

/** The whole storage of c after the kernel. */
export function run(on: Device, c: Case, { a, b, c: out, bias }: Operands): Float32Array {
	using aTensor = Tensor.from(on, a.values, undefined, { dtype: a.dtype });
	using bTensor = Tensor.from(on, b.values, undefined, { dtype: b.dtype });
	using cTensor = Tensor.from(on, out.values, undefined, { dtype: out.dtype });
	using biasTensor = bias === null ? null : Tensor.from(on, bias, undefined, { dtype: b.dtype });
	on.run("gemm", {
		a: aTensor,
		b: bTensor,
		c: cTensor,
		bias: biasTensor,
		m: c.m,
		n: c.n,
		k: c.k,
		a_stride: a.stride,
		b_stride: b.stride,
		c_stride: out.stride,
		batch: c.batch ?? 1,
		a_batch_stride: a.batchStride,
		b_batch_stride: c.sharedB ? 0 : b.batchStride,
		c_batch_stride: out.batchStride,
		alpha: c.alpha ?? 1,
		beta: c.beta ?? 0,
		transpose_a: Number(c.transposeA ?? false),
		transpose_b: Number(c.transposeB ?? false),
		beside_collective: 0,
		a_dtype: aTensor.dtypeCode,
		b_dtype: bTensor.dtypeCode,
		c_dtype: cTensor.dtypeCode,
	});
	return cTensor.toFloat32();
}

/** The expected content of c's storage, by float64 arithmetic. */
export function expectedOf(c: Case, { a, b, c: out, bias }: Operands): Float64Array {
	const { m, n, k, batch = 1, alpha = 1, beta = 0 } = c;
	const [aStep, aRowStep] = c.transposeA ? [a.stride, 1] : [1, a.stride];
	const [bStep, bColumnStep] = c.transposeB ? [1, b.stride] : [b.stride, 1];
	const expected = Float64Array.from(out.values);
	for (let index = 0; index < batch; index++) {
		for (let i = 0; i < m; i++) {
			const aRow = a.offset(index, 0) + i * aRowStep;
			for (let j = 0; j < n; j++) {
				const bColumn = (c.sharedB ? 0 : b.offset(index, 0)) + j * bColumnStep;
				let sum = 0;
				for (let l = 0; l < k; l++) sum += a.values[aRow + l * aStep]! * b.values[bColumn + l * bStep]!;
				const at = out.offset(index, i) + j;
				const old = beta === 0 ? 0 : beta * out.values[at]!;
				expected[at] = alpha * sum + old + (bias?.[j] ?? 0);
			}
		}
	}
	return expected;
}

/** relativeRms of the places that should hold a number; infinite where a gap was written. */
export function difference(actual: Float32Array, expected: ArrayLike<number>): number {
	const wanted = Float64Array.from(expected);
	if (actual.some((value, i) => Number.isNaN(value) !== Number.isNaN(wanted[i]))) return Number.POSITIVE_INFINITY;
	return relativeRms(
		actual.map((value) => (Number.isNaN(value) ? 0 : value)),
		wanted.map((value) => (Number.isNaN(value) ? 0 : value)),
	);
}
