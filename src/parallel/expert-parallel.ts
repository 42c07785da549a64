/**
 * Token exchange between ranks that hold different experts (spec language-model 4.5). The dispatch group is expt_tp × ep,
 * expt_tp fastest: expert e lives on the `expertTensor` members of expert-parallel rank e / (E / EP), each with a part of
 * its channels. A token copy goes to all of them, and their partial outputs are summed on the way back.
 */
import type { Device } from "../native/device.ts";
import type { ExpertOrder } from "../tensor/ops/permute.ts";
import type { Tape } from "../tensor/tape.ts";
import { axpby, Tensor } from "../tensor/tensor.ts";
import type { Group, RowRanges } from "./group.ts";

export interface ExpertParallel {
	/** The dispatch group (tp_ep). */
	readonly group: Group;
	/** Ranks over which one expert's channels are cut. */
	readonly expertTensor: number;
	/** Experts of this rank. */
	readonly localExperts: number;
}

/** Where every row of one dispatch goes and comes from; made once, used by rows and probabilities, both ways. */
export class Exchange implements Disposable {
	private constructor(
		readonly parallel: ExpertParallel,
		/** Rows this rank sends to each member, in expert order. */
		readonly sent: RowRanges,
		/** Rows this rank receives from each member: source-major. */
		readonly received: RowRanges,
		/** i32 [rows]: received row that stands at each row of (local expert, source) order. */
		readonly sourceOfRow: Tensor,
		/** i32 [rows]: the inverse. */
		readonly rowOfSource: Tensor,
		/** i32 [localExperts + 1]: first row of every local expert. */
		readonly offsets: Tensor,
		readonly sentRows: number,
		readonly receivedRows: number,
	) {}

	/** Reads the expert counts back (one copy), tells every member, and plans the exchange. */
	static plan(device: Device, order: ExpertOrder, parallel: ExpertParallel): Exchange {
		const { group, expertTensor, localExperts } = parallel;
		const offsets = order.offsets.toInt32();
		const experts = offsets.length - 1;
		const counts = Int32Array.from({ length: experts }, (_, e) => offsets[e + 1]! - offsets[e]!);
		const everyCount = group.exchange(counts);
		const firstExpert = Math.floor(group.rank / expertTensor) * localExperts;
		const members = Array.from({ length: group.size }, (_, member) => member);
		const sent = {
			offsets: members.map((member) => offsets[Math.floor(member / expertTensor) * localExperts]!),
			counts: members.map((member) => {
				const first = Math.floor(member / expertTensor) * localExperts;
				return offsets[first + localExperts]! - offsets[first]!;
			}),
		};
		const countOf = (member: number, local: number) => everyCount[member]![firstExpert + local]!;
		const received = { offsets: [] as number[], counts: [] as number[] };
		let receivedRows = 0;
		for (const member of members) {
			received.offsets.push(receivedRows);
			let rows = 0;
			for (let local = 0; local < localExperts; local++) rows += countOf(member, local);
			received.counts.push(rows);
			receivedRows += rows;
		}
		// Received rows are source-major, then by expert; experts want theirs side by side, sources in order.
		const cursor = [...received.offsets];
		const sourceOfRow = new Int32Array(receivedRows);
		const localOffsets = new Int32Array(localExperts + 1);
		let row = 0;
		for (let local = 0; local < localExperts; local++) {
			for (const member of members) {
				for (let i = 0; i < countOf(member, local); i++) sourceOfRow[row++] = cursor[member]!++;
			}
			localOffsets[local + 1] = row;
		}
		const rowOfSource = new Int32Array(receivedRows);
		sourceOfRow.forEach((source, at) => {
			rowOfSource[source] = at;
		});
		return new Exchange(
			parallel,
			sent,
			received,
			Tensor.from(device, sourceOfRow),
			Tensor.from(device, rowOfSource),
			Tensor.from(device, localOffsets),
			offsets[experts]!,
			receivedRows,
		);
	}

	/** Shares of everything a backward closure reads. */
	get tensors(): readonly Tensor[] {
		return [this.sourceOfRow, this.rowOfSource, this.offsets];
	}

	[Symbol.dispose](): void {
		for (const tensor of this.tensors) tensor[Symbol.dispose]();
	}
}

/** rows_RW in global expert order → the rows of this rank's experts, in (local expert, source, row) order. */
export function dispatchRows(tape: Tape, rows: Tensor, exchange: Exchange): Tensor {
	const y = tape.output(forwardRows(rows, exchange), rows.gradient !== null);
	tape.record({
		name: "dispatch",
		outputs: [y],
		keep: exchange.tensors,
		backward: ([dy]) => {
			const drows = rows.gradient!.contiguousTarget();
			backwardRows(dy!, drows, exchange);
			rows.gradient!.accumulate(drows);
		},
	});
	return y;
}

/** Outputs of this rank's experts → the rows of this rank's tokens in global expert order (`slots` of them at most). */
export function combineRows(tape: Tape, outputs: Tensor, exchange: Exchange, slots: number, rowCount: Tensor): Tensor {
	using all = tape.output(Tensor.empty(tape.device, [slots, outputs.width], outputs.dtype), outputs.gradient !== null);
	const rows = all.withRowCount(rowCount);
	backwardRows(outputs, rows, exchange);
	tape.record({
		name: "combine",
		outputs: [rows],
		keep: [...exchange.tensors, rowCount],
		backward: ([drows]) => {
			outputs.gradient!.accumulate(forwardRows(drows!, exchange));
		},
	});
	return rows;
}

/** Sends rows in expert order to where their experts are, and sorts what arrives by local expert. */
function forwardRows(rows: Tensor, exchange: Exchange): Tensor {
	const { device } = rows;
	const width = rows.shape.length > 1 ? rows.width : 1;
	using matrix = rows.view([rows.elements / width, width]);
	using arrived = Tensor.empty(device, [exchange.receivedRows, width], rows.dtype);
	exchange.parallel.group.allToAll(matrix, exchange.sent, arrived, exchange.received).wait();
	const shape = rows.shape.length > 1 ? [exchange.receivedRows, width] : [exchange.receivedRows];
	const sorted = Tensor.empty(device, shape, rows.dtype);
	gatherRows(arrived, exchange.sourceOfRow, sorted, exchange.receivedRows, width);
	return sorted;
}

/** The way back: rows by local expert return to their tokens' ranks; parts from several members of an expert add up. */
function backwardRows(sorted: Tensor, rows: Tensor, exchange: Exchange): void {
	const { device } = rows;
	const { group, expertTensor } = exchange.parallel;
	const width = rows.shape.length > 1 ? rows.width : 1;
	using bySource = Tensor.empty(device, [exchange.receivedRows, width], rows.dtype);
	gatherRows(sorted, exchange.rowOfSource, bySource, exchange.receivedRows, width);
	// One region for each member of an expert's tensor-parallel group; with one, that region is the result itself.
	const regions =
		expertTensor === 1 ? rows.share() : Tensor.empty(device, [expertTensor * exchange.sentRows, width], rows.dtype);
	using parts = regions;
	using matrix = parts.view([parts.elements / width, width]);
	const back = {
		offsets: exchange.sent.offsets.map((offset, member) => (member % expertTensor) * exchange.sentRows + offset),
		counts: exchange.sent.counts,
	};
	group.allToAll(bySource, exchange.received, matrix, back).wait();
	if (expertTensor === 1) return;
	using target = rows.view([rows.elements / width, width]);
	using live = target.rowsFrom(0, exchange.sentRows);
	for (let part = 0; part < expertTensor; part++) {
		using region = matrix.rowsFrom(part * exchange.sentRows, exchange.sentRows);
		axpby(region, live, 1, part === 0 ? 0 : 1);
	}
}

/** to[r] = from[index[r]]. */
function gatherRows(from: Tensor, index: Tensor, to: Tensor, rows: number, width: number): void {
	from.device.run("moe_permute", {
		x: from,
		probabilities: null,
		slot_of_row: index,
		row_count: null,
		rows: to,
		row_probability: null,
		tokens: rows,
		topk: 1,
		width,
		dtype: from.dtypeCode,
	});
}
