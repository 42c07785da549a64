/**
 * A group whose other members do not exist: this rank continues as if they had taken part, and every transfer is counted.
 * On a real device this rank's own data stand for the data that they would have sent.
 */
import type { DeviceRanges, Group, Pending, RowRanges, RowStage, RowsOfMember } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";

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
	/** Integers that a member of a group would send: rows of items by sample. */
	readonly integers: (group: string, length: number) => Int32Array;
	/** Rows that this rank's experts get from all members, over those of an even routing. */
	readonly imbalance: number;
}

const done: Pending = { wait() {} };

export class SimulatedGroup implements Group {
	readonly rank: number;
	readonly size: number;
	/** The part of a group's data that other members have. */
	readonly #others: number;
	/** Rows from other ranks over this rank's own: its own routing is even, so rows beyond that come from the others. */
	readonly #fromOthers: number;
	/** The window that a GPU opens for the others' rows. */
	#window: Tensor | null = null;

	constructor(
		readonly name: string,
		readonly ranks: readonly number[],
		private readonly globalRank: number,
		private readonly options: SimulationOptions,
	) {
		this.size = ranks.length;
		this.rank = ranks.indexOf(globalRank);
		this.#others = (this.size - 1) / this.size;
		this.#fromOthers = (options.imbalance * this.size - 1) / (this.size - 1);
	}

	allReduce(x: Tensor): Pending {
		return this.#count("allReduce", 2 * this.#others * x.bytes);
	}

	reduceScatter(x: Tensor, y: Tensor): Pending {
		using part = flat(x).rowsFrom(this.rank, 1, y.elements);
		copy(part.tensor, y);
		return this.#count("reduceScatter", this.#others * x.bytes);
	}

	allGather(x: Tensor, y: Tensor): Pending {
		const bytes = (this.size - 1) * x.bytes;
		if (x.dtype === "i32") {
			y.device.copyToDevice(y, everyOffsets(x.toInt32(), this.size, this.rank, this.#fromOthers));
			return this.#count("planRows", bytes);
		}
		for (let member = 0; member < this.size; member++) {
			using part = flat(y).rowsFrom(member, 1, x.elements);
			copy(x, part.tensor);
		}
		return this.#count("allGather", bytes);
	}

	broadcast(x: Tensor, root: number): Pending {
		if (this.rank !== root) invent(x, (length) => this.options.integers(this.name, length));
		return this.#count("broadcast", x.bytes);
	}

	allToAll(send: Tensor, sendRows: RowRanges, receive: Tensor, receiveRows: RowRanges): Pending {
		fillRows(send, sendRows, receive, receiveRows);
		const sent = sendRows.counts.reduce((sum, rows, member) => sum + (member === this.rank ? 0 : rows), 0);
		return this.#count("allToAll", send.rows === 0 ? 0 : (sent * send.bytes) / send.rows);
	}

	exchangeRows(send: RowsOfMember, receive: RowsOfMember, ranges: DeviceRanges, stage: RowStage): Pending {
		this.#openWindow(send, stage.rows);
		const sent = rowsForEach(ranges.out.toInt32(), this.size);
		let rowBytes = 0;
		for (const [from, to] of [
			[send.rows, receive.rows],
			[send.beside, receive.beside],
		] as const) {
			if (!from || !to || from.rows === 0) continue;
			to.device.copy(to, from, Math.min(from.bytes, to.bytes));
			rowBytes += from.bytes / from.rows;
		}
		const toEach = sent.map((rows, member) => (member === this.rank ? 0 : rows * rowBytes));
		const bytes = toEach.reduce((sum, bytes) => sum + bytes, 0);
		return this.#count("exchangeRows", bytes, this.ranks, toEach);
	}

	rowTransport(): "host" {
		return "host";
	}

	send(x: Tensor, to: number): Pending {
		return this.#count("send", x.bytes, [this.globalRank, this.ranks[to]!]);
	}

	receive(x: Tensor, from: number): Pending {
		invent(x, (length) => this.options.integers(this.name, length));
		return this.#count("receive", x.bytes, [this.globalRank, this.ranks[from]!]);
	}

	barrier(): void {}

	exchange(values: Int32Array): Int32Array[] {
		this.#count("exchange", values.byteLength);
		return this.ranks.map((_, member) => (member === this.rank ? values : even(values, this.#fromOthers)));
	}

	contribute(): void {}

	#count(kind: TransferKind, bytes: number, among = this.ranks, toEach?: readonly number[]): Pending {
		const rows = toEach && { rows: { from: this.globalRank, bytes: toEach } };
		if (this.size > 1) this.options.observe({ group: this.name, kind, ranks: among, bytes, ...rows });
		return done;
	}

	#openWindow({ rows, beside }: RowsOfMember, stageRows: number): void {
		const rowBytes = (x: Tensor | null) => (x === null || x.rows === 0 ? 0 : x.bytes / x.rows);
		const bytes = Math.ceil(stageRows * (rowBytes(rows) + rowBytes(beside)));
		if (rows.device.library.kind === "cpu" || bytes <= (this.#window?.bytes ?? 0)) return;
		this.#window?.[Symbol.dispose]();
		this.#window = Tensor.empty(rows.device, [bytes], "u8", "communication");
	}
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
function invent(x: Tensor, integers: (length: number) => Int32Array): void {
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
