/**
 * Token exchange between ranks that hold different experts (docs/spec/language-model.md §4.5). The dispatch group is
 * expt_tp × ep, expt_tp fastest: expert e lives on the `expertTensor` members of expert-parallel rank e / (E / EP),
 * each with a part of its channels. A token copy goes to all of them, and their partial outputs are summed on the way
 * back.
 */
import type { Device } from "../native/device.ts";
import type { ExpertOrder } from "../tensor/ops/permute.ts";
import type { Tape } from "../tensor/tape.ts";
import { axpby, Tensor } from "../tensor/tensor.ts";
import type { Group, Pending, RowRanges } from "./group.ts";

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

/**
 * Rows on their way to other ranks. What is queued between start and finish hides the time that they take. Backward the same:
 * where they were finished their gradients' way back is started, and where they were started that way ends.
 */
export interface Travelling extends Disposable {
	/** The rows that have come. Called once. */
	finish(): Tensor;
}

/** One way, started: `end` waits and gives what has come. Both ends stay allocated until then. */
interface Journey extends Disposable {
	end(): Tensor;
}

/** Starts rows_RW in global expert order on their way to their experts; they come by (local expert, source, row). */
export function startDispatch(tape: Tape, rows: Tensor, exchange: Exchange): Travelling {
	return travel(tape, "dispatch", exchange.tensors, rows, {
		out: (sent) => toExperts(sent, exchange),
		back: (gradient) => fromExperts(gradient, rows.gradient!.contiguousTarget(), exchange),
	});
}

/**
 * Starts the outputs of this rank's experts on their way back; they come in global expert order of this rank's tokens
 * (`slots` rows at most, of which `rowCount` are live).
 */
export function startCombine(
	tape: Tape,
	outputs: Tensor,
	exchange: Exchange,
	slots: number,
	rowCount: Tensor,
): Travelling {
	return travel(tape, "combine", [...exchange.tensors, rowCount], outputs, {
		out: (sent) => {
			using all = Tensor.empty(tape.device, [slots, outputs.width], outputs.dtype);
			return fromExperts(sent, all.withRowCount(rowCount), exchange);
		},
		back: (gradient) => toExperts(gradient, exchange),
	});
}

/** An exchange as two records of the tape; the second is made by finish. */
function travel(
	tape: Tape,
	name: string,
	keep: readonly Tensor[],
	rows: Tensor,
	ways: { readonly out: (sent: Tensor) => Journey; readonly back: (gradient: Tensor) => Journey },
): Travelling {
	const journey = ways.out(rows);
	let wayBack: Journey | null = null;
	// Nothing reads it: its gradient tells the first record that the way back has been started.
	using ticket = tape.output(Tensor.empty(tape.device, [1]), rows.gradient !== null);
	const started = ticket.gradient;
	tape.record({
		name: `start ${name}`,
		outputs: [ticket],
		own: [{ [Symbol.dispose]: () => wayBack?.[Symbol.dispose]() }],
		backward: () => {
			rows.gradient!.accumulate(wayBack!.end());
			wayBack = null;
		},
	});
	return {
		finish: () => {
			const y = tape.output(journey.end(), rows.gradient !== null);
			tape.record({
				name,
				outputs: [y],
				keep,
				backward: ([gradient]) => {
					wayBack = ways.back(gradient!);
					started!.accumulate(Tensor.empty(tape.device, [1]));
				},
			});
			return y;
		},
		[Symbol.dispose]: () => journey[Symbol.dispose](),
	};
}

/** Sends rows in expert order to where their experts are; what arrives is sorted by local expert. */
function toExperts(rows: Tensor, exchange: Exchange): Journey {
	const { device } = rows;
	const width = rows.shape.length > 1 ? rows.width : 1;
	const matrix = rows.view([rows.elements / width, width]);
	const arrived = Tensor.empty(device, [exchange.receivedRows, width], rows.dtype);
	const pending = exchange.parallel.group.allToAll(matrix, exchange.sent, arrived, exchange.received);
	const shape = rows.shape.length > 1 ? [exchange.receivedRows, width] : [exchange.receivedRows];
	return journeyOf(pending, [matrix, arrived], () => {
		const sorted = Tensor.empty(device, shape, rows.dtype);
		gatherRows(arrived, exchange.sourceOfRow, sorted, exchange.receivedRows, width);
		return sorted;
	});
}

/**
 * The way back: rows by local expert return to their tokens' ranks, into `target` (taken over); parts from several members of
 * an expert add up.
 */
function fromExperts(sorted: Tensor, target: Tensor, exchange: Exchange): Journey {
	const { device } = sorted;
	const { group, expertTensor } = exchange.parallel;
	const width = sorted.shape.length > 1 ? sorted.width : 1;
	const bySource = Tensor.empty(device, [exchange.receivedRows, width], sorted.dtype);
	gatherRows(sorted, exchange.rowOfSource, bySource, exchange.receivedRows, width);
	// One region for each member of an expert's tensor-parallel group; with one, that region is the result itself.
	using regions =
		expertTensor === 1 ? target.share() : Tensor.empty(device, [expertTensor * exchange.sentRows, width], sorted.dtype);
	const matrix = regions.view([regions.elements / width, width]);
	const back = {
		offsets: exchange.sent.offsets.map((offset, member) => (member % expertTensor) * exchange.sentRows + offset),
		counts: exchange.sent.counts,
	};
	const pending = group.allToAll(bySource, exchange.received, matrix, back);
	return journeyOf(pending, [bySource, matrix, target], () => {
		if (expertTensor > 1) {
			using whole = target.view([target.elements / width, width]);
			using live = whole.rowsFrom(0, exchange.sentRows);
			for (let part = 0; part < expertTensor; part++) {
				using region = matrix.rowsFrom(part * exchange.sentRows, exchange.sentRows);
				axpby(region, live, 1, part === 0 ? 0 : 1);
			}
		}
		return target.share();
	});
}

/** A journey that holds `ends` until it has ended, or is given up. */
function journeyOf(pending: Pending, ends: readonly Tensor[], arrive: () => Tensor): Journey {
	let under = true;
	const release = () => {
		if (under) for (const end of ends) end[Symbol.dispose]();
		under = false;
	};
	return {
		end: () => {
			pending.wait();
			const come = arrive();
			release();
			return come;
		},
		[Symbol.dispose]: release,
	};
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
