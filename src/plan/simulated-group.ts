/**
 * A group whose other members do not exist: this rank continues as if they had taken part, and every transfer is counted.
 * On a real device what they would have sent is this rank's own data again.
 */
import type { Group, Pending, RowRanges, RowsOfMember } from "../parallel/group.ts";
import { Tensor } from "../tensor/tensor.ts";

/**
 * "exchange": host values; a GPU stands still until its host has them. "planRows": how many experts' rows go where, which
 * the host waits for only where GPUs do not open each other's memory. "exchangeRows": the rows.
 */
export type TransferKind =
	| "allReduce"
	| "reduceScatter"
	| "allGather"
	| "broadcast"
	| "allToAll"
	| "planRows"
	| "exchangeRows"
	| "send"
	| "receive"
	| "exchange";

/** One collective of this rank. */
export interface Transfer {
	readonly group: string;
	readonly kind: TransferKind;
	/** Global ranks of the group; of a message this one and the other. */
	readonly ranks: readonly number[];
	/** Bytes this rank sends, with ring algorithms; of a receive: those it gets. */
	readonly bytes: number;
	/** Of experts' rows: the rank that sends, and the bytes to each of the ranks. */
	readonly rows?: { readonly from: number; readonly bytes: readonly number[] };
}

export interface SimulationOptions {
	/** Called with every transfer. */
	readonly observe: (transfer: Transfer) => void;
	/** Integers that a member would send: rows of images by sample. */
	readonly integers: (length: number) => Int32Array;
	/** Rows that this rank's experts get from all members, over those of an even routing. */
	readonly imbalance: number;
}

const done: Pending = { wait() {} };

export function simulatedGroup(
	name: string,
	ranks: readonly number[],
	globalRank: number,
	{ observe, integers, imbalance }: SimulationOptions,
): Group {
	const size = ranks.length;
	const rank = ranks.indexOf(globalRank);
	const count = (kind: TransferKind, bytes: number, among = ranks, toEach?: readonly number[]): Pending => {
		const rows = toEach && { rows: { from: globalRank, bytes: toEach } };
		if (size > 1) observe({ group: name, kind, ranks: among, bytes, ...rows });
		return done;
	};
	/** The window that a GPU opens for the others' rows. */
	let window: Tensor | null = null;
	const openWindow = ({ rows, beside }: RowsOfMember, stageRows: number) => {
		const rowBytes = (x: Tensor | null) => (x === null || x.rows === 0 ? 0 : x.bytes / x.rows);
		const bytes = Math.ceil(stageRows * (rowBytes(rows) + rowBytes(beside)));
		if (rows.device.library.kind === "cpu" || bytes <= (window?.bytes ?? 0)) return;
		window?.[Symbol.dispose]();
		window = Tensor.empty(rows.device, [bytes], "u8", "communication");
	};
	const others = (size - 1) / size;
	// This rank's own routing is even: rows beyond that come from the others.
	const fromOthers = (imbalance * size - 1) / (size - 1);
	return {
		name,
		ranks,
		rank,
		size,
		allReduce: (x) => count("allReduce", 2 * others * x.bytes),
		reduceScatter: (x, y) => {
			using part = flat(x).rowsFrom(rank, 1, y.elements);
			copy(part.tensor, y);
			return count("reduceScatter", others * x.bytes);
		},
		allGather: (x, y) => {
			if (x.dtype === "i32") {
				y.device.copyToDevice(y, everyOffsets(x.toInt32(), size, rank, fromOthers));
				return count("planRows", (size - 1) * x.bytes);
			}
			for (let member = 0; member < size; member++) {
				using part = flat(y).rowsFrom(member, 1, x.elements);
				copy(x, part.tensor);
			}
			return count("allGather", (size - 1) * x.bytes);
		},
		broadcast: (x, root) => {
			if (rank !== root) invent(x, integers);
			return count("broadcast", x.bytes);
		},
		allToAll: (send, sendRows, receive, receiveRows) => {
			fillRows(send, sendRows, receive, receiveRows);
			const sent = sendRows.counts.reduce((sum, rows, member) => sum + (member === rank ? 0 : rows), 0);
			return count("allToAll", send.rows === 0 ? 0 : (sent * send.bytes) / send.rows);
		},
		exchangeRows: (send, receive, ranges, stage) => {
			openWindow(send, stage.rows);
			const sent = rowsForEach(ranges.out.toInt32(), size);
			let rowBytes = 0;
			for (const [from, to] of [
				[send.rows, receive.rows],
				[send.beside, receive.beside],
			] as const) {
				if (!from || !to || from.rows === 0) continue;
				to.device.copy(to, from, Math.min(from.bytes, to.bytes));
				rowBytes += from.bytes / from.rows;
			}
			const toEach = sent.map((rows, member) => (member === rank ? 0 : rows * rowBytes));
			return count(
				"exchangeRows",
				toEach.reduce((sum, bytes) => sum + bytes, 0),
				ranks,
				toEach,
			);
		},
		rowTransport: () => "host",
		send: (x, to) => count("send", x.bytes, [globalRank, ranks[to]!]),
		receive: (x, from) => {
			invent(x, integers);
			return count("receive", x.bytes, [globalRank, ranks[from]!]);
		},
		barrier: () => {},
		exchange: (values) => {
			count("exchange", values.byteLength);
			return ranks.map((_, member) => (member === rank ? values : even(values, fromOthers)));
		},
		tell: () => {},
	};
}

/** The sum of `values`, times `factor`, in equal parts: rows that other ranks' routers send to every expert. */
function even(values: Int32Array, factor: number): Int32Array {
	const total = factor * values.reduce((sum, value) => sum + value, 0);
	return values.map((_, i) => Math.ceil((total * (i + 1)) / values.length) - Math.ceil((total * i) / values.length));
}

/** Every member's first rows of all experts: others' routings are even, of `factor` times as many rows. */
function everyOffsets(own: Int32Array, size: number, rank: number, factor: number): Int32Array {
	const all = new Int32Array(size * own.length);
	for (let member = 0; member < size; member++) {
		all.set(member === rank ? own : own.map((value) => Math.ceil(factor * value)), member * own.length);
	}
	return all;
}

/** Rows of the ranges of each member. */
function rowsForEach(ranges: Int32Array, size: number): number[] {
	const rows = new Array<number>(size).fill(0);
	const length = ranges.length / size;
	for (let at = 2; at < ranges.length; at += 3) rows[Math.floor(at / length)]! += ranges[at]!;
	return rows;
}

/** A contiguous tensor as parts of equally many elements. */
function flat(x: Tensor) {
	return {
		rowsFrom(first: number, parts: number, elements: number): { tensor: Tensor } & Disposable {
			using matrix = x.view([x.elements / elements, elements]);
			const tensor = matrix.rowsFrom(first, parts);
			return { tensor, [Symbol.dispose]: () => tensor[Symbol.dispose]() };
		},
	};
}

function copy(from: Tensor, to: Tensor): void {
	if (from.allocation === to.allocation && from.byteOffset === to.byteOffset) return;
	from.device.copy(to, from, Math.min(from.bytes, to.bytes));
}

/** Something sensible where a member's data would be. */
function invent(x: Tensor, integers: SimulationOptions["integers"]): void {
	if (x.dtype === "i32") x.device.copyToDevice(x, integers(x.elements));
	else if (x.elements > 0) x.device.run("fill", { y: x, elements: x.elements, value: 0.01, dtype: x.dtypeCode });
}

/** Every member's rows are this rank's own. */
function fillRows(send: Tensor, sendRows: RowRanges, receive: Tensor, receiveRows: RowRanges): void {
	if (send.rows === 0) return;
	receiveRows.counts.forEach((rows, member) => {
		const available = Math.min(rows, sendRows.counts[member]!);
		using from = send.rowsFrom(sendRows.offsets[member]!, available);
		using to = receive.rowsFrom(receiveRows.offsets[member]!, available);
		if (available > 0) receive.device.copy(to, from, from.bytes);
	});
}
