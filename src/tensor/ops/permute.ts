/** Token copies into expert order and back (docs/spec/language-model.md §4.5). A slot is token * K + choice. */
import type { Device } from "../../native/device.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type FloatDtype, Tensor } from "../tensor.ts";
import { type E4m3Form, E4m3Rows } from "./e4m3.ts";

/** The row of every routed token copy: rows are sorted by (expert, token). */
export class ExpertOrder implements Disposable {
	private constructor(
		/** int32 [experts + 1]: first row of every expert; the last entry is the number of rows. */
		readonly offsets: Tensor,
		/** i32 [1], the last entry of `offsets`: number of live rows. */
		readonly rowCount: Tensor,
		/** int32 [T K], -1 for a dropped slot. */
		readonly rowOfSlot: Tensor,
		/** int32 [T K], live rows only. */
		readonly slotOfRow: Tensor,
		readonly tokens: number,
		readonly topk: number,
	) {}

	/** Sorts expertIndex_TK; an index outside 0 .. experts - 1 (such as -1) drops its slot. */
	static of(device: Device, expertIndex: Tensor, experts: number): ExpertOrder {
		const [tokens, topk] = [expertIndex.rows, expertIndex.width];
		const slots = tokens * topk;
		const offsets = Tensor.empty(device, [experts + 1], "i32");
		const rowOfSlot = Tensor.empty(device, [slots], "i32");
		const slotOfRow = Tensor.empty(device, [slots], "i32");
		device.run("moe_sort", {
			expert_index: expertIndex,
			offsets,
			row_of_slot: rowOfSlot,
			slot_of_row: slotOfRow,
			tokens,
			topk,
			experts,
		});
		return new ExpertOrder(offsets, offsets.columns(experts, 1), rowOfSlot, slotOfRow, tokens, topk);
	}

	/** Upper bound of the number of rows: no slot dropped. */
	get slots(): number {
		return this.tokens * this.topk;
	}

	/** Shares of everything a backward closure reads. */
	get tensors(): readonly Tensor[] {
		return [this.offsets, this.rowCount, this.rowOfSlot, this.slotOfRow];
	}

	[Symbol.dispose](): void {
		for (const tensor of this.tensors) tensor[Symbol.dispose]();
	}
}

export interface PermutedRows {
	/** [T K, width] in expert order, or the bytes of `inE4m3`; rowCount says how many are live. */
	readonly rows: Tensor;
	/** The rows in e4m3; null: not asked for. */
	readonly inE4m3: E4m3Rows | null;
	/** f32 [T K]: the routing weight of every row. */
	readonly rowProbability: Tensor;
}

/** Memory of rows: f32 or bf16 from `empty`, with e4m3 beside it if `form` says so; in e4m3 alone `rows` are the bytes. */
function memoryOfRows(
	device: Device,
	[count, width]: readonly [number, number],
	form: E4m3Form | null,
	empty: () => Tensor,
) {
	const inE4m3 = form && new E4m3Rows(device, count, width);
	return { rows: form === "alone" ? inE4m3!.values.share() : empty(), inE4m3 };
}

/** Fields of moe_permute for the memory of its rows. */
function writtenFields(rows: Tensor, inE4m3: E4m3Rows | null) {
	const rounded = { e4m3: inE4m3?.values ?? null, e4m3_factors: inE4m3?.factors ?? null };
	return { rows: rows.dtype === "u8" ? null : rows, ...rounded };
}

/**
 * x_TW and probabilities_TK → one row for every slot that is not dropped, with its probability. `inE4m3`: rounded too or alone; on a
 * GPU bf16, W a multiple of 16.
 */
export function permute(
	tape: Tape,
	x: Tensor,
	probabilities: Tensor,
	order: ExpertOrder,
	options: { readonly inE4m3: E4m3Form | null } = { inE4m3: null },
): PermutedRows {
	const { device } = tape;
	if (!x.contiguous || x.rows !== order.tokens) throw new RangeError(`Rows of [${x.shape}] cannot be permuted.`);
	const shape = { tokens: order.tokens, topk: order.topk, width: x.width, dtype: x.dtypeCode };
	const wanted = x.gradient !== null || probabilities.gradient !== null;
	const size = [order.slots, x.width] as const;
	const written = memoryOfRows(device, size, options.inE4m3, () => Tensor.empty(device, size, x.dtype));
	using allRows = tape.output(written.rows, wanted, x.dtype as FloatDtype);
	using allProbabilities = tape.output(Tensor.empty(device, [order.slots]), wanted);
	const rows = allRows.withRowCount(order.rowCount);
	const rowProbability = allProbabilities.withRowCount(order.rowCount);
	const { inE4m3 } = written;
	device.run("moe_permute", {
		...shape,
		...writtenFields(rows, inE4m3),
		x,
		probabilities,
		slot_of_row: order.slotOfRow,
		row_count: order.rowCount,
		row_probability: rowProbability,
	});
	tape.record({
		name: "permute",
		outputs: [rows, rowProbability],
		keep: order.tensors,
		backward: ([gradient, drowProbability]) => {
			using drows = gradient ? contiguous(gradient) : null;
			const dx = drows ? (x.gradient?.contiguousTarget() ?? null) : null;
			const dprobabilities = drowProbability ? (probabilities.gradient?.contiguousTarget() ?? null) : null;
			device.run("moe_unpermute", {
				...shape,
				width: dx ? shape.width : 0,
				rows: dx ? drows : null,
				row_probability: dprobabilities ? drowProbability! : null,
				row_of_slot: order.rowOfSlot,
				y: dx,
				probabilities: dprobabilities,
			});
			if (dx) x.gradient!.accumulate(dx);
			if (dprobabilities) probabilities.gradient!.accumulate(dprobabilities);
		},
	});
	return { rows, inE4m3, rowProbability };
}

/** Matrices of T rows → a row of each for every slot that is not dropped. Gradients of a token's copies are summed in fp32. */
export function permuteRows(tape: Tape, matrices: readonly Tensor[], order: ExpertOrder): Tensor[] {
	const { device } = tape;
	const { tokens, topk, slots, rowCount } = order;
	const wanted = matrices.some(({ gradient }) => gradient !== null);
	const shapes = matrices.map((x) => ({ tokens, topk, width: x.width, dtype: x.dtypeCode }));
	const permuted = matrices.map((x, index) => {
		if (!x.contiguous || x.rows !== tokens) throw new RangeError(`Rows of [${x.shape}] cannot be permuted.`);
		using all = tape.output(Tensor.empty(device, [slots, x.width], x.dtype), wanted);
		const rows = all.withRowCount(rowCount);
		device.run("moe_permute", {
			...shapes[index]!,
			...writtenFields(rows, null),
			x,
			probabilities: null,
			slot_of_row: order.slotOfRow,
			row_count: rowCount,
			row_probability: null,
		});
		return rows;
	});
	tape.record({
		name: "permute rows",
		outputs: permuted,
		keep: order.tensors,
		backward: (gradients) => {
			for (const [index, x] of matrices.entries()) {
				const gradient = gradients[index];
				if (!gradient || !x.gradient) continue;
				using drows = contiguous(gradient);
				const dx = x.gradient.contiguousTarget();
				device.run("moe_unpermute", {
					...shapes[index]!,
					rows: drows,
					row_probability: null,
					row_of_slot: order.rowOfSlot,
					y: dx,
					probabilities: null,
				});
				x.gradient.accumulate(dx);
			}
		},
	});
	return permuted;
}

/** y_TW = Σ over a token's slots of rows_RW, summed in fp32 and rounded once; a token without slots gets zeros. */
export function unpermute(tape: Tape, rows: Tensor, order: ExpertOrder): Tensor {
	const { device } = tape;
	if (!rows.contiguous || rows.rows !== order.slots) throw new RangeError(`Rows of [${rows.shape}] are not in order.`);
	const shape = { tokens: order.tokens, topk: order.topk, width: rows.width, dtype: rows.dtypeCode };
	const y = tape.output(Tensor.empty(device, [order.tokens, rows.width], rows.dtype), rows.gradient !== null);
	device.run("moe_unpermute", {
		...shape,
		rows,
		row_probability: null,
		row_of_slot: order.rowOfSlot,
		y,
		probabilities: null,
	});
	tape.record({
		name: "unpermute",
		outputs: [y],
		keep: order.tensors,
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const slot = rows.gradient!;
			// Gradients are not added in e4m3: a slot that holds one gets the rows unrounded.
			const form = slot.filled ? null : slot.wantsE4m3;
			const written = memoryOfRows(device, [order.slots, shape.width], form, () => slot.contiguousTarget());
			device.run("moe_permute", {
				...shape,
				...writtenFields(written.rows, written.inE4m3),
				x: dy,
				probabilities: null,
				slot_of_row: order.slotOfRow,
				row_count: order.rowCount,
				row_probability: null,
			});
			slot.accumulate(written.rows, written.inE4m3);
		},
	});
	return y;
}
