/** Y = base + s (X Aᵀ) Bᵀ: a frozen projection with its low-rank adapter (Hu et al., LoRA, equation 3). */
import type { Device } from "../../native/device.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { axpby, contiguous, type FloatDtype, Tensor } from "../tensor.ts";
import { addGroupedWeightGradient, groupedGemm } from "./grouped-linear.ts";
import { addWeightGradient, gemm } from "./linear.ts";

/** The matrices of an adapter, or stacks of them by expert, and what their product is multiplied by. */
export interface LowRank {
	/** a_RI. */
	readonly a: Parameter;
	/** b_OR. */
	readonly b: Parameter;
	/** s = α / r. */
	readonly scale: number;
}

/** Products with a matrix, or with the matrices of the experts that rows belong to. */
interface Products {
	/** Tensors that late weight gradients read besides their operands. */
	readonly reads: readonly Tensor[];
	/** x · wᵀ where `transposed`, else x · w. */
	product(x: Tensor, weight: Parameter, transposed: boolean): Tensor;
	/** y += h · bᵀ. */
	add(h: Tensor, b: Parameter, y: Tensor): void;
	/** dw += dyᵀ · x. */
	addWeightGradient(dy: Tensor, x: Tensor, weight: Parameter): void;
}

/** base_TO + s (x_TI aᵀ) bᵀ, written over `base`, which it takes over. One type of storage for all. */
export function addLowRank(tape: Tape, base: Tensor, x: Tensor, adapter: LowRank): Tensor {
	return addProducts(tape, base, x, adapter, denseProducts(tape.device));
}

/**
 * addLowRank for rows sorted by expert: rows offsets[g] ≤ r < offsets[g + 1] times a_gRI, then b_gOR. x: contiguous. Rows of
 * `base` from the last offset on are undefined.
 */
export function addGroupedLowRank(tape: Tape, base: Tensor, x: Tensor, adapter: LowRank, offsets: Tensor): Tensor {
	return addProducts(tape, base, x, adapter, groupedProducts(tape.device, offsets));
}

/** base_TO + s h_TR b_ORᵀ, written over `base`, which it takes over: the second product of an adapter whose first one is done. */
export function addScaledProduct(tape: Tape, base: Tensor, h: Tensor, { b, scale }: Omit<LowRank, "a">): Tensor {
	const products = denseProducts(tape.device);
	const scaled = Tensor.empty(tape.device, [h.rows, h.width], h.dtype as FloatDtype);
	axpby(h, scaled, scale, 0);
	products.add(scaled, b, base);
	const baseWants = base.gradient !== null;
	const y = baseWants ? base : tape.output(base, h.gradient !== null || b.trainable);
	tape.record({
		name: "scaled_product",
		outputs: [y],
		own: [scaled],
		parameters: [b],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			if (b.trainable) tape.weightGradient([dy, scaled], () => products.addWeightGradient(dy, scaled, b));
			if (h.gradient) {
				const dh = products.product(dy, b, false);
				axpby(dh, dh, scale, 0);
				h.gradient.accumulate(dh);
			}
			if (baseWants) y.gradient!.accumulate(dy.share());
		},
	});
	return y;
}

function addProducts(tape: Tape, base: Tensor, x: Tensor, { a, b, scale }: LowRank, products: Products): Tensor {
	const h = products.product(x, a, true);
	axpby(h, h, scale, 0);
	products.add(h, b, base);
	const baseWants = base.gradient !== null;
	const y = baseWants ? base : tape.output(base, x.gradient !== null || a.trainable || b.trainable);
	tape.record({
		name: "low_rank",
		outputs: [y],
		keep: [x, ...products.reads],
		own: [h],
		parameters: [a, b],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			using dh = products.product(dy, b, false);
			axpby(dh, dh, scale, 0);
			if (b.trainable) tape.weightGradient([dy, h, ...products.reads], () => products.addWeightGradient(dy, h, b));
			if (a.trainable) tape.weightGradient([dh, x, ...products.reads], () => products.addWeightGradient(dh, x, a));
			if (x.gradient) x.gradient.accumulate(products.product(dh, a, false));
			// The projection, recorded before this operation, goes backward next.
			if (baseWants) y.gradient!.accumulate(dy.share());
		},
	});
	return y;
}

function denseProducts(device: Device): Products {
	return {
		reads: [],
		product: (x, { value: w }, transposed) => {
			const y = Tensor.empty(device, [x.rows, transposed ? w.rows : w.width], x.dtype as FloatDtype);
			gemm(device, { tensor: x, transposed: false }, { tensor: w, transposed }, y);
			return y;
		},
		add: (h, b, y) =>
			gemm(device, { tensor: h, transposed: false }, { tensor: b.value, transposed: true }, y, { beta: 1 }),
		addWeightGradient: (dy, x, weight) => addWeightGradient(device, dy, x, weight),
	};
}

function groupedProducts(device: Device, offsets: Tensor): Products {
	const product: Products["product"] = (x, { value: w }, transposed) => {
		const [, outputs, inputs] = w.shape as readonly [number, number, number];
		const y = Tensor.empty(device, [x.rows, transposed ? outputs : inputs], x.dtype);
		groupedGemm(device, x, w, transposed, offsets, y);
		return y;
	};
	return {
		reads: [offsets],
		product,
		add: (h, b, y) => {
			using added = product(h, b, true);
			axpby(added, y, 1, 1);
		},
		addWeightGradient: (dy, x, weight) => addGroupedWeightGradient(device, dy, x, weight, offsets),
	};
}
