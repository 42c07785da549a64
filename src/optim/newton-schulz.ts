/**
 * Newton-Schulz iteration: X → U S' Vᵀ with S' near 1 for X = U S Vᵀ, by products alone (docs/spec/runtime.md §4.5). A step is
 * A = X Xᵀ, X ← a X + (b A + c A²) X, on the smaller of both axes.
 */
import type { Device } from "../native/device.ts";
import { type FloatDtype, Tensor } from "../tensor/index.ts";

type Step = readonly [a: number, b: number, c: number];

/**
 * Coefficients by Megatron's names (--muon-coefficient-type): of the steps from the first on, and whether further steps repeat the
 * last ones instead of beginning anew. Sources: simple, quintic: github.com/KellerJordan/modded-nanogpt and
 * leloykun.github.io/ponder/muon-opt-coeffs; polar_express: arXiv 2505.16932, divided by powers of 1.01 as in its algorithm 1;
 * cans: arXiv 2506.10935; aol: github.com/thib-s/flash-newton-schulz.
 */
const coefficients = {
	simple: [[3.4445, -4.775, 2.0315]],
	quintic: [
		[4.0848, -6.8946, 2.927],
		[3.9505, -6.3029, 2.6377],
		[3.7418, -5.5913, 2.3037],
		[2.8769, -3.1427, 1.2046],
		[2.8366, -3.0525, 1.2012],
	],
	polar_express: [
		[8.2051, -22.9019, 16.4607],
		[4.0664, -2.8612, 0.5184],
		[3.9096, -2.8234, 0.525],
		[3.2856, -2.4153, 0.4853],
		[2.2779, -1.6198, 0.3985],
		[1.8726, -1.2307, 0.3585],
		[1.8564, -1.2132, 0.3568],
		[1.875, -1.25, 0.375],
	],
	cans: [
		[8.4703, -25.1081, 18.6293],
		[4.1828, -3.1087, 0.5806],
		[3.9619, -2.9541, 0.563],
		[3.2866, -2.4647, 0.5074],
		[2.2737, -1.6447, 0.4162],
	],
	aol: [
		[4.0098, -7.0585, 2.4635],
		[3.4585, -5.5479, 2.5959],
		[2.7573, -3.2939, 1.4254],
		[2.7215, -3.0494, 1.3169],
	],
} as const satisfies Readonly<Record<string, readonly Step[]>>;

export type CoefficientType = keyof typeof coefficients;
const repeatsLast: readonly CoefficientType[] = ["polar_express", "cans"];

/** The coefficients of `count` steps. */
export function stepsOf(type: CoefficientType, count: number): Step[] {
	const own: readonly Step[] = coefficients[type];
	const at = (step: number) => (repeatsLast.includes(type) ? Math.min(step, own.length - 1) : step % own.length);
	return Array.from({ length: count }, (_, step) => own[at(step)]!);
}

/** Added to nothing: the least Frobenius norm that matrices are divided by, as in Megatron's emerging_optimizers. */
const leastNorm = 1e-15;

/** FLOPs of an iteration of `steps` steps for a matrix; a multiply-add counts 2. */
export function flopsOf(rows: number, columns: number, steps: number): number {
	const [short, long] = [Math.min(rows, columns), Math.max(rows, columns)];
	return steps * short ** 2 * (4 * long + 2 * short);
}

/**
 * x [matrices, rows, columns], f32 → the result of the iteration, of the same shape, in `dtype`, in which the products read and write.
 * The caller disposes it.
 */
export function orthogonalize(x: Tensor, steps: readonly Step[], dtype: FloatDtype): Tensor {
	const { device } = x;
	const [matrices, rows, columns] = x.shape as readonly [number, number, number];
	const elements = rows * columns;
	let value = Tensor.empty(device, x.shape, dtype, "workspace");
	device.run("muon_normalize", { x, y: value, matrices, elements, epsilon: leastNorm, dtype: value.dtypeCode });
	const side = Math.min(rows, columns);
	using gram = Tensor.empty(device, [matrices, side, side], dtype, "workspace");
	using polynomial = Tensor.empty(device, [matrices, side, side], dtype, "workspace");
	const wide = rows <= columns;
	let next = Tensor.empty(device, x.shape, dtype, "workspace");
	for (const [a, b, c] of steps) {
		products(device, value, value, gram, { transposeA: !wide, transposeB: wide });
		device.copy(polynomial, gram, gram.bytes);
		products(device, gram, gram, polynomial, { alpha: c, beta: b });
		device.copy(next, value, value.bytes);
		const [left, right] = wide ? [polynomial, value] : [value, polynomial];
		products(device, left, right, next, { beta: a });
		[value, next] = [next, value];
	}
	next[Symbol.dispose]();
	return value;
}

/** c_i = alpha op(a_i) op(b_i) + beta c_i of matrices of one dtype, [matrices, rows, columns] each. */
function products(
	device: Device,
	a: Tensor,
	b: Tensor,
	c: Tensor,
	options: { alpha?: number; beta?: number; transposeA?: boolean; transposeB?: boolean },
): void {
	const { alpha = 1, beta = 0, transposeA = false, transposeB = false } = options;
	const stride = ({ shape }: Tensor) => shape[1]! * shape[2]!;
	device.run("gemm", {
		...{ a, b, c, bias: null },
		m: c.shape[1]!,
		n: c.shape[2]!,
		k: a.shape[transposeA ? 1 : 2]!,
		a_stride: a.shape[2]!,
		b_stride: b.shape[2]!,
		c_stride: c.shape[2]!,
		batch: c.shape[0]!,
		a_batch_stride: stride(a),
		b_batch_stride: stride(b),
		c_batch_stride: stride(c),
		...{ alpha, beta },
		transpose_a: Number(transposeA),
		transpose_b: Number(transposeB),
		a_dtype: a.dtypeCode,
		b_dtype: b.dtypeCode,
		c_dtype: c.dtypeCode,
		beside_collective: 0,
	});
}
