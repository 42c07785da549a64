/** Feed-forward layers of experts in float64 on plain arrays (docs/spec/moe-performance.md §1.1, §1.2, §1.5). */

export type ExpertActivation = "squaredRelu" | "swiglu" | "quickGeglu";

export interface ExpertShape {
	/** Rows of every expert. */
	readonly loads: readonly number[];
	readonly hidden: number;
	readonly width: number;
	readonly activation: ExpertActivation;
	readonly clamp?: number;
	readonly linearOffset?: number;
	readonly interleave?: number;
}

export interface ExpertValues {
	readonly x: ArrayLike<number>;
	readonly p: ArrayLike<number>;
	readonly w1: ArrayLike<number>;
	readonly w2: ArrayLike<number>;
	readonly b1?: ArrayLike<number>;
	readonly b2?: ArrayLike<number>;
}

/** First row of every expert and the end, from their loads. */
export function offsetsOf(loads: readonly number[]): Int32Array {
	let total = 0;
	return Int32Array.from([0, ...loads], (load) => (total += load));
}

export const isGlu = (activation: ExpertActivation) => activation !== "squaredRelu";

/** The row of fc1 that holds output channel j's gate, and the one that holds its linear part. */
export function gateRows(j: number, width: number, interleave = 0): readonly [gate: number, linear: number] {
	if (interleave === 0) return [j, width + j];
	const gate = 2 * interleave * Math.floor(j / interleave) + (j % interleave);
	return [gate, gate + interleave];
}

const sigmoid = (x: number) => 1 / (1 + Math.exp(-x));

/** y [rows, hidden]. */
export function expertReference(shape: ExpertShape, { x, p, w1, w2, b1, b2 }: ExpertValues): Float64Array {
	const { loads, hidden, width, activation, clamp = Number.POSITIVE_INFINITY, linearOffset = 0, interleave } = shape;
	const zWidth = isGlu(activation) ? 2 * width : width;
	const y = new Float64Array(loads.reduce((sum, load) => sum + load, 0) * hidden);
	let t = 0;
	for (const [g, load] of loads.entries()) {
		for (const end = t + load; t < end; t++) {
			const z = (row: number) => {
				let sum = b1?.[g * zWidth + row] ?? 0;
				for (let i = 0; i < hidden; i++) sum += x[t * hidden + i]! * w1[(g * zWidth + row) * hidden + i]!;
				return sum;
			};
			const a = Float64Array.from({ length: width }, (_, j) => {
				if (!isGlu(activation)) return Math.max(z(j), 0) ** 2;
				const [gateRow, linearRow] = gateRows(j, width, interleave);
				const gate = Math.min(z(gateRow), clamp);
				const linear = Math.max(-clamp, Math.min(z(linearRow), clamp));
				if (activation === "swiglu") return gate * sigmoid(gate) * linear;
				return gate * sigmoid(1.702 * gate) * (linear + linearOffset);
			});
			for (let o = 0; o < hidden; o++) {
				let sum = 0;
				for (let j = 0; j < width; j++) sum += a[j]! * w2[(g * hidden + o) * width + j]!;
				y[t * hidden + o] = p[t]! * (sum + (b2?.[g * hidden + o] ?? 0));
			}
		}
	}
	return y;
}
