/**
 * A process group. Members call its operations in one order. Reductions add in rank order, so results repeat bit for bit.
 * Operations are ordered with the device's stream, so later operations on the stream see complete results.
 */
import type { RowStageName, RowTransportName } from "../native/abi.ts";
import type { Tensor } from "../tensor/index.ts";

export type Reduction = "sum" | "max";

/** Ranges of rows by member: member i's are [offsets[i], offsets[i] + counts[i]). */
export interface RowRanges {
	readonly offsets: readonly number[];
	readonly counts: readonly number[];
}

/** Consecutive ranges of the given lengths. */
export function consecutive(counts: readonly number[]): RowRanges {
	let at = 0;
	const offsets = counts.map((count) => {
		at += count;
		return at - count;
	});
	return { offsets, counts };
}

/**
 * Ranges of rows in device memory, i32 [size, runs, 3]: for each member and run its first row here, its first row at the member,
 * and its length. `out` go to the members, `in` come from them; B's `in` for A equals A's `out` for B.
 */
export interface DeviceRanges {
	readonly out: Tensor;
	readonly in: Tensor;
	/** `out` then `in` on the host, if the row transport is "counts"; else null. */
	readonly onHost: Int32Array | null;
}

/** Rows [R, W] and further values [R, W'] of another dtype that are sent in the same message. */
export interface RowsOfMember {
	readonly rows: Tensor;
	readonly beside: Tensor | null;
}

/** Which side's rows other members access (peer transport), and the largest number of rows at that side; equal at all members. */
export interface RowStage {
	readonly at: RowStageName;
	readonly rows: number;
}

/** A collective that has been started. */
export interface Pending {
	/** Orders later work on the stream after the collective. */
	wait(): void;
}

export interface Group {
	/** Name, such as "language.tp". */
	readonly name: string;
	/** Global ranks of the members, in group order. */
	readonly ranks: readonly number[];
	/** This rank's index among the members. */
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
	/** Sends ranges of `send` to all members, into ranges of `receive`. Ranges of `send` may overlap. */
	allToAll(send: Tensor, sendRows: RowRanges, receive: Tensor, receiveRows: RowRanges): Pending;
	/** As allToAll, with ranges in device memory that no host has to know. */
	exchangeRows(send: RowsOfMember, receive: RowsOfMember, ranges: DeviceRanges, stage: RowStage): Pending;
	/** The transport of exchangeRows, equal at all members. Collective; to be called before the first exchange. */
	rowTransport(): RowTransportName;
	/**
	 * Sends x to a member, which receives a tensor of equal bytes. The first message of a pair waits for both and connects both
	 * directions; an empty one connects its direction alone. First messages that two members send each other at the same time
	 * must both be empty or both not, or each waits for a direction that the other does not connect.
	 */
	send(x: Tensor, to: number): Pending;
	receive(x: Tensor, from: number): Pending;
	/** Waits until every member has called it. */
	barrier(): void;
	/** All-gathers host integers; waits. */
	exchange(values: Int32Array): Int32Array[];
	/** Like exchange, for a member that does not need the result and does not wait. */
	contribute(values: Int32Array): void;
}

const done: Pending = { wait() {} };

/** A group of one rank: no data move, except if the result of an operation is a copy. */
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
		// A single rank holds all experts, so nothing is ever exchanged.
		exchangeRows: alone,
		rowTransport: () => "host",
		send: alone,
		receive: alone,
		barrier: () => {},
		exchange: (values) => [values],
		contribute: () => {},
	};
}

// Exchanges texts of any length between ranks, such as names and data states. Waits for the host, so not for use within a step.

/** Returns every member's text, by member. Collective over the group. */
export function exchangeTexts(group: Group, text: string): string[] {
	if (group.size === 1) return [text];
	const bytes = Bun.gzipSync(new TextEncoder().encode(text));
	const lengths = group.exchange(Int32Array.of(bytes.length)).map(([length]) => length!);
	const padded = new Int32Array(Math.ceil(Math.max(...lengths) / 4));
	new Uint8Array(padded.buffer).set(bytes);
	return group.exchange(padded).map((values, member) => {
		const packed = Uint8Array.from(new Uint8Array(values.buffer, values.byteOffset, lengths[member]!));
		return new TextDecoder().decode(Bun.gunzipSync(packed));
	});
}
