/**
 * Muon (docs/spec/runtime.md §4.5): the direction of a matrix's momentum, orthogonalized as a whole whatever the layout. Ranks that
 * hold parts of the same matrices deal them out: each sends its parts of a direction to the rank that iterates on the matrix, and
 * gets its parts of the update back, in place of its gradients.
 */
import type { Group, RowRanges } from "../parallel/index.ts";
import { type FloatDtype, Tensor } from "../tensor/index.ts";
import { dealMatrices, type MatrixRows, type MatrixStack, type Share } from "./muon-shares.ts";
import { type CoefficientType, orthogonalize, stepsOf } from "./newton-schulz.ts";
import type { OptimizerShard, UpdateRule } from "./optimizer.ts";
import type { StepScalars } from "./step-scalars.ts";

export interface MuonOptions {
	readonly momentum: number;
	readonly nesterov: boolean;
	readonly coefficients: CoefficientType;
	/** Steps of the Newton-Schulz iteration. */
	readonly steps: number;
	/** Factor of an update, by the whole matrix's shape. */
	readonly scale: keyof typeof scales;
	/** Further factor of every update. */
	readonly extraScale: number;
	/** medium: products in bf16 on GPUs. The CPU library's are fp32 always: it has no faster ones. */
	readonly precision: "medium" | "high";
}

/** Factors by Megatron's names (--muon-scale-mode) for matrices [out, in]. */
const scales = {
	spectral: (rows: number, columns: number) => Math.sqrt(Math.max(rows, columns)),
	unit_rms_norm: (rows: number, columns: number) => Math.sqrt(rows / columns),
	shape_scaling: (rows: number, columns: number) => Math.sqrt(Math.max(1, rows / columns)),
} as const;

/** Most elements of matrices that are worked on at once, of which there are a few copies. */
const mostElements = 2 ** 26;

export class Muon implements UpdateRule {
	readonly states = { momentum_buffer: "f32" } as const;
	readonly #shares = new WeakMap<OptimizerShard, Share>();

	constructor(
		readonly scalars: StepScalars,
		readonly options: MuonOptions,
	) {}

	update(shards: readonly OptimizerShard[]): void {
		for (const shard of shards) {
			this.#advance(shard);
			this.#orthogonalize(shard);
			this.#apply(shard);
		}
	}

	/** Advances the momentum of the range; the gradients become directions. */
	#advance({ buffer, begin, end, states }: OptimizerShard): void {
		const { scalars, options } = this;
		using gradient = buffer.gradients!.columns(begin, end - begin);
		scalars.device.run("muon_momentum", {
			momentum: states.get("momentum_buffer")!,
			gradient,
			clip_factor: scalars.get("clipFactor"),
			found_inf: scalars.get("foundInf"),
			elements: end - begin,
			beta: options.momentum,
			nesterov: Number(options.nesterov),
		});
	}

	/** Directions of the range become updates. */
	#orthogonalize(shard: OptimizerShard): void {
		const { replica, buffer } = shard;
		const group = replica.matrixGroupOf(buffer);
		const share = this.#shares.get(shard) ?? dealMatrices(shard, this.options.steps);
		this.#shares.set(shard, share);
		const gradients = buffer.gradients!;
		if (group.size === 1) {
			this.#iterate(gradients, share);
			return;
		}
		using parts = Tensor.empty(gradients.device, [share.parts * share.elements], "f32", "workspace");
		exchange(group, gradients, share.given, parts, share.taken);
		this.#iterate(parts, share);
		exchange(group, parts, share.returned, gradients, share.got);
	}

	/** Iterates on this rank's matrices, parts of which lie one after the other in `held`. */
	#iterate(held: Tensor, share: Share): void {
		for (const stack of share.stacks) {
			const most = Math.max(1, Math.floor(mostElements / (stack.rows * stack.columns * share.parts)));
			for (let first = 0; first < stack.count; first += most) {
				const some = { ...stack, count: Math.min(most, stack.count - first) };
				some.offset += first * stack.rows * stack.columns;
				for (const matrix of stack.matrices) this.#iterateOn(held, share, some, matrix);
			}
		}
	}

	/** Iterates on one block of rows of all matrices of a stack. */
	#iterateOn(held: Tensor, { parts, elements }: Share, stack: MatrixStack, matrix: MatrixRows): void {
		const { device } = held;
		const { options } = this;
		const { shape, runs } = placesOf(stack, matrix, parts);
		const copy = (whole: Tensor, part: number, back: boolean) => {
			const start = stack.offset + matrix.begin * stack.columns + part * elements;
			using there = held.columns(start, held.elements - start);
			using flat = whole.view([whole.elements]);
			using here = flat.columns(part * runs.next, whole.elements - part * runs.next);
			device.run("axpby", {
				x: back ? here : there,
				y: back ? there : here,
				row_count: null,
				rows: runs.count,
				width: runs.width,
				x_stride: back ? runs.joined : runs.apart,
				y_stride: back ? runs.apart : runs.joined,
				alpha: back ? options.extraScale * scales[options.scale](shape[1], shape[2]) : 1,
				beta: 0,
				x_dtype: back ? here.dtypeCode : there.dtypeCode,
				y_dtype: back ? there.dtypeCode : here.dtypeCode,
			});
		};
		const gather = () => {
			const whole = Tensor.empty(device, shape, "f32", "workspace");
			for (let part = 0; part < parts; part++) copy(whole, part, false);
			return whole;
		};
		const together = parts === 1 && stack.matrices.length === 1;
		using direction = together ? stackOf(held, stack, shape) : gather();
		const dtype: FloatDtype = options.precision === "medium" && device.library.kind !== "cpu" ? "bf16" : "f32";
		using result = orthogonalize(direction, stepsOf(options.coefficients, options.steps), dtype);
		for (let part = 0; part < parts; part++) copy(result, part, true);
	}

	/** p -= rate · (decay · p + update). */
	#apply({ buffer, begin: first, master: masters, runs }: OptimizerShard): void {
		const { scalars } = this;
		for (const { begin, end, decay, rate } of runs) {
			using master = masters.columns(begin - first, end - begin);
			using values = buffer.values.columns(begin, end - begin);
			using update = buffer.gradients!.columns(begin, end - begin);
			scalars.device.run("muon_update", {
				master,
				model: buffer.dtype === "f32" ? null : values,
				update,
				learning_rate: scalars.get("learningRate"),
				weight_decay: scalars.get("weightDecay"),
				found_inf: scalars.get("foundInf"),
				elements: end - begin,
				weight_decay_multiplier: decay,
				learning_rate_multiplier: rate,
				model_dtype: values.dtypeCode,
			});
		}
	}
}

/** A stack that lies in one piece, as it lies. */
function stackOf(held: Tensor, { offset }: MatrixStack, shape: readonly [number, number, number]): Tensor {
	using flat = held.columns(offset, shape[0] * shape[1] * shape[2]);
	return flat.view(shape);
}

/**
 * The shape [count, rows, columns] of a block of rows of a stack's matrices, put together, and its runs of neighbouring elements: how
 * far `apart` they begin in a part and `joined` in the whole, and where those of the next part begin there.
 */
function placesOf({ count, rows, columns, cut, period, matrices }: MatrixStack, matrix: MatrixRows, parts: number) {
	const local = (matrix.rows * rows) / period;
	if (cut === 1) {
		const runs = { count: count * local, width: columns, apart: columns, joined: parts * columns, next: columns };
		return { shape: [count, local, parts * columns] as const, runs };
	}
	const shape = [count, parts * local, columns] as const;
	const next = local * columns;
	if (matrices.length === 1) {
		return { shape, runs: { count, width: next, apart: next, joined: parts * next, next } };
	}
	const width = matrix.rows * columns;
	return { shape, runs: { count: (count * rows) / period, width, apart: period * columns, joined: width, next } };
}

/** Sends ranges of elements of a flat tensor to all members, into ranges of another. */
function exchange(group: Group, from: Tensor, given: RowRanges, to: Tensor, taken: RowRanges): void {
	using send = from.view([from.elements, 1]);
	using receive = to.view([to.elements, 1]);
	group.allToAll(send, given, receive, taken).wait();
}
