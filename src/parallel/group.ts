/**
 * A set of ranks that communicate. Members call the same operations in the same order; reductions add in rank order, so
 * results repeat bit for bit. Every operation is queued in the order of the device's stream, so that later operations
 * read complete results.
 */
import type { RowStageName, RowTransportName } from "../native/abi.ts";
import type { Tensor } from "../tensor/tensor.ts";

export type Reduction = "sum" | "max";

/** Rows that go to, or come from, each member: member i's are rows [offsets[i], offsets[i] + counts[i]). */
export interface RowRanges {
	readonly offsets: readonly number[];
	readonly counts: readonly number[];
}

/** Runs of so many rows, one after the other. */
export function consecutive(counts: readonly number[]): RowRanges {
	let at = 0;
	const offsets = counts.map((count) => {
		at += count;
		return at - count;
	});
	return { offsets, counts };
}

/**
 * Runs of rows that the device knows, i32 [size, runs, 3]: for each member, of every run its first row here, its first row at
 * the member, and how many rows. `out` go to the members, `in` come from them; the `in` of a member
 * B says of a member A the same as A's `out` says of B.
 */
export interface DeviceRanges {
	readonly out: Tensor;
	readonly in: Tensor;
	/** Both, one after the other, where the row transport is "counts"; else null. */
	readonly onHost: Int32Array | null;
}

/** Rows [R, W] of one member, and what goes beside them in the same message: as many rows of another width and type. */
export interface RowsOfMember {
	readonly rows: Tensor;
	readonly beside: Tensor | null;
}

/** The side at which rows lie when other members reach for them, and the most rows of that side; equal at all members. */
export interface RowStage {
	readonly at: RowStageName;
	readonly rows: number;
}

/** A collective that has been started. */
export interface Pending {
	/** Work queued from now on sees the result. */
	wait(): void;
}

export interface Group {
	/** Such as "language.tp". */
	readonly name: string;
	/** Global ranks of the members, in group order. */
	readonly ranks: readonly number[];
	/** This rank's place among them. */
	readonly rank: number;
	readonly size: number;

	/** x = reduction of every member's x. Contiguous. */
	allReduce(x: Tensor, reduction?: Reduction): Pending;
	/**
	 * y = this member's part of the sum of every member's x; x holds `size` parts of y's elements each. y may be its own
	 * part of x; the rest of x is then undefined.
	 */
	reduceScatter(x: Tensor, y: Tensor): Pending;
	/** y = every member's x one after the other. x may be its own part of y. */
	allGather(x: Tensor, y: Tensor): Pending;
	/** x = member `root`'s x. */
	broadcast(x: Tensor, root: number): Pending;
	/** Rows of `send` to every member, into rows of `receive`. Ranges of `send` may overlap. */
	allToAll(send: Tensor, sendRows: RowRanges, receive: Tensor, receiveRows: RowRanges): Pending;
	/**
	 * Rows of `send` to every member, into rows of `receive`, in ranges that no host has to know.
	 */
	exchangeRows(send: RowsOfMember, receive: RowsOfMember, ranges: DeviceRanges, stage: RowStage): Pending;
	/** The transport of exchangeRows, equal at all members. Every member calls this before the first exchange, and waits for the others. */
	rowTransport(): RowTransportName;
	/**
	 * Sends x to a member, which receives a tensor of as many bytes. The first message of two members waits for both, and connects
	 * them in both directions; without elements it connects its own direction alone. First messages that two members send
	 * each other at once must both have elements or both have none: else each waits for the direction that the other is not at.
	 */
	send(x: Tensor, to: number): Pending;
	receive(x: Tensor, from: number): Pending;
	/** Returns when every member has called it. */
	barrier(): void;
	/** Every member's integers, by member; host values, waits. */
	exchange(values: Int32Array): Int32Array[];
	/** Like exchange, for a member that needs no answer: it does not wait. */
	tell(values: Int32Array): void;
}

const done: Pending = { wait() {} };

/** The group of one rank: no data move, except where an operation's result is a copy. */
export function groupOfOne(name: string, rank: number): Group {
	const copy = (from: Tensor, to: Tensor): Pending => {
		if (from.allocation !== to.allocation || from.byteOffset !== to.byteOffset) {
			from.device.copy(to, from, from.bytes);
		}
		return done;
	};
	const alone = (): never => {
		throw new Error(`${name} has one member: it cannot send or receive.`);
	};
	return {
		name,
		ranks: [rank],
		rank: 0,
		size: 1,
		allReduce: () => done,
		reduceScatter: copy,
		allGather: copy,
		broadcast: () => done,
		allToAll: (send, sendRows, receive, receiveRows) => {
			using from = send.rowsFrom(sendRows.offsets[0]!, sendRows.counts[0]!);
			using to = receive.rowsFrom(receiveRows.offsets[0]!, receiveRows.counts[0]!);
			return copy(from, to);
		},
		// Experts of one rank exchange nothing.
		exchangeRows: alone,
		rowTransport: () => "host",
		send: alone,
		receive: alone,
		barrier: () => {},
		exchange: (values) => [values],
		tell: () => {},
	};
}
