/**
 * One rank's end of an edge: sends rows forward and their gradients back (docs/spec/runtime.md §2). Image rows are sample-major
 * and are sent with their number for each sample; the number of hidden states is known on both sides. A lane that serves several
 * lanes splits its samples over them; a lane that is served by several concatenates their rows.
 */
import type { Device } from "../native/device.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor/index.ts";
import { type EdgeLayout, type Links, linksOf, reversed } from "./edge-layout.ts";
import type { Group, Pending } from "./group.ts";

/** Rows of a microbatch, and their number for each sample; empty if both sides know it. */
export interface Rows {
	/** [Σ rows, H]; owned by the receiver. */
	readonly rows: Tensor;
	readonly rowsPerSample: readonly number[];
	/** Further matrices [Σ rows, …] that are sent along and get no gradient; default: none. Owned as `rows` is. */
	readonly companions?: readonly Tensor[];
}

/** How a microbatch's rows are sent. */
export interface Passage {
	/** Whether their gradient is sent back. */
	readonly returns: boolean;
	/** The matrices that are sent along without a gradient; default: none. */
	readonly companions?: readonly Companion[];
}

/** A matrix that is sent along with rows: its width, and its type where that is not the rows'. */
export interface Companion {
	readonly width: number;
	readonly dtype?: FloatDtype;
}

export interface EdgeOptions {
	readonly layout: EdgeLayout;
	/** This rank. */
	readonly rank: number;
	/** Groups of both sides' ranks, one for each direction; null: no row leaves this rank. */
	readonly groups: { readonly forward: Group; readonly backward: Group } | null;
	/** Width and type of rows. */
	readonly width: number;
	readonly dtype: FloatDtype;
	/** Whether the number of rows of each sample is sent with them. */
	readonly counted: boolean;
	/** Largest number of microbatches in flight in each direction; a sender waits before it sends more. */
	readonly inFlight: number;
}

interface Message {
	readonly values: Tensor;
	readonly pending: Pending;
}

/** Rows that a rank passes to itself. */
type Handed = { readonly rows: Tensor | null; readonly rowsPerSample: readonly number[] };

const sum = (values: readonly number[]) => values.reduce((total, value) => total + value, 0);

/** The messages of one direction. */
class Line {
	/** Messages in flight, a list for each microbatch, the oldest first. */
	readonly #sent: Message[][] = [];
	readonly #handed: Handed[] = [];

	constructor(
		readonly options: EdgeOptions,
		readonly links: Links,
		readonly group: Group | null,
		readonly device: Device,
	) {}

	/**
	 * Connects to the ranks at the other ends by sending empty messages in this line's directions only; the other directions
	 * would cost NCCL memory and time. All ranks handle messages in one order: by pair of ranks, and within a pair the message to
	 * the higher rank first. Both ranks of the first pending message therefore reach it, and no ranks deadlock.
	 */
	connect(): void {
		const { rank } = this.options;
		const sends = new Set(this.links.sends.map(({ peer }) => peer));
		const receives = new Set(this.links.receives.map(({ peer }) => peer));
		const peers = [...sends.union(receives)].filter((peer) => peer !== rank);
		const below = (a: number, b: number) =>
			Math.min(a, rank) - Math.min(b, rank) || Math.max(a, rank) - Math.max(b, rank);
		using nothing = peers.length > 0 ? Tensor.empty(this.device, [0]) : null;
		for (const peer of peers.sort(below)) {
			const place = this.#place(peer);
			const send = () => sends.has(peer) && this.#group.send(nothing!, place).wait();
			const receive = () => receives.has(peer) && this.#group.receive(nothing!, place).wait();
			for (const exchange of rank < peer ? [send, receive] : [receive, send]) exchange();
		}
	}

	/** Starts sending parts of `rows` with `counts` rows each; the caller may release them. null: zeros. */
	send(rows: Tensor | null, counts: readonly number[], headers: readonly (readonly number[])[] | null): void {
		if (this.links.sends.length === 0) return;
		this.settle(this.options.inFlight - 1);
		this.#sent.push([]);
		using zeros = rows === null && this.#leaves ? this.zeros(sum(counts)) : null;
		for (const { peer, part } of this.links.sends) {
			const begin = sum(counts.slice(0, part));
			const count = counts[part]!;
			const rowsPerSample = headers?.[part] ?? [];
			if (peer === this.options.rank) {
				this.#handed.push({ rows: rows?.rowsFrom(begin, count) ?? null, rowsPerSample });
				continue;
			}
			if (rowsPerSample.length > 0) this.#start(Tensor.from(this.device, Int32Array.from(rowsPerSample)), peer);
			if (count > 0) this.#start((rows ?? zeros)!.rowsFrom(begin, count), peer);
		}
	}

	/**
	 * Receives the parts of one microbatch and concatenates them; null if this rank has passed itself nothing. `samples`: of each
	 * part, whose rows are counted if `counts` is null.
	 */
	receive(counts: readonly number[] | null, samples: readonly number[]): { rows: Tensor | null; perPart: number[][] } {
		const { receives } = this.links;
		const { rank } = this.options;
		const handed = receives.some(({ peer }) => peer === rank) ? this.#handed.shift()! : null;
		if (handed && receives.length === 1) return { rows: handed.rows, perPart: [[...handed.rowsPerSample]] };
		const perPart = receives.map(({ peer }, index) => {
			if (counts !== null) return [];
			return peer === rank ? [...handed!.rowsPerSample] : this.#receiveCounts(samples[index]!, peer);
		});
		const sizes = counts ?? perPart.map(sum);
		const rows = this.empty(sum(sizes));
		let begin = 0;
		receives.forEach(({ peer }, index) => {
			const count = sizes[index]!;
			using part = rows.rowsFrom(begin, count);
			if (peer === rank) this.#take(handed!, part);
			else if (count > 0) this.#group.receive(part, this.#place(peer)).wait();
			begin += count;
		});
		return { rows, perPart };
	}

	/** Waits for sent messages, except those of the newest `underWay` microbatches, and releases their memory. */
	settle(underWay = 0): void {
		for (const { values, pending } of this.#sent.splice(0, Math.max(0, this.#sent.length - underWay)).flat()) {
			pending.wait();
			values[Symbol.dispose]();
		}
	}

	/** Releases rows that this rank has passed to itself and never taken. */
	drop(): void {
		for (const { rows } of this.#handed.splice(0)) rows?.[Symbol.dispose]();
	}

	empty(rows: number): Tensor {
		return Tensor.empty(this.device, [rows, this.options.width], this.options.dtype, "communication");
	}

	zeros(rows: number): Tensor {
		return Tensor.zeros(this.device, [rows, this.options.width], this.options.dtype);
	}

	/** Whether this line sends to other ranks. */
	get #leaves(): boolean {
		return this.links.sends.some(({ peer }) => peer !== this.options.rank);
	}

	#take({ rows }: Handed, into: Tensor): void {
		if (rows === null) into.device.setZero(into, into.bytes);
		else if (into.rows > 0) copyInto(rows, into);
		rows?.[Symbol.dispose]();
	}

	#receiveCounts(length: number, from: number): number[] {
		if (length === 0) return [];
		using tensor = Tensor.empty(this.device, [length], "i32", "communication");
		this.#group.receive(tensor, this.#place(from)).wait();
		return [...tensor.toInt32()];
	}

	/** Starts a send and takes ownership of `values`. */
	#start(values: Tensor, to: number): void {
		this.#sent.at(-1)!.push({ values, pending: this.#group.send(values, this.#place(to)) });
	}

	get #group(): Group {
		if (this.group === null) throw new Error("An edge without a group has no other ranks.");
		return this.group;
	}

	#place(rank: number): number {
		return this.#group.ranks.indexOf(rank);
	}
}

export class Edge implements Disposable {
	readonly #forward: Line;
	/** Send the companions, each in its place, in the same groups as the rows and after them; made when they are needed. */
	readonly #companions: Line[] = [];
	readonly #backward: Line;
	/** Rows of each part, oldest microbatch first: of sent rows whose gradient is expected, and of received rows. */
	readonly #sent: number[][] = [];
	readonly #received: number[][] = [];

	constructor(
		device: Device,
		readonly options: EdgeOptions,
	) {
		const { layout, rank, groups } = options;
		this.#forward = new Line(options, linksOf(layout, rank), groups?.forward ?? null, device);
		this.#backward = new Line(options, linksOf(reversed(layout), rank), groups?.backward ?? null, device);
	}

	#companion(place: number, form: Companion): Line {
		const { options, links, group, device } = this.#forward;
		this.#companions[place] ??= new Line({ ...options, ...form }, links, group, device);
		return this.#companions[place];
	}

	/**
	 * Connects to the ranks at the other ends; every rank connects its edges in the order of their chunks. The first NCCL message
	 * of a pair blocks the host until both are there: left to the first step, a rank that sends images and a rank that sends
	 * hidden states the other way would deadlock.
	 */
	connect(): void {
		this.#forward.connect();
		this.#backward.connect();
	}

	/** Starts sending the rows of one microbatch; the caller may release them. `returns`: their gradient is sent back. */
	sendForward({ rows, rowsPerSample, companions = [] }: Rows, { returns }: Pick<Passage, "returns">): void {
		// A rank that sends nothing still receives the gradients of all parts.
		const parts = this.#backward.links.receives.length;
		const headers = this.options.counted
			? Array.from({ length: parts }, (_, part) => {
					const per = rowsPerSample.length / parts;
					return rowsPerSample.slice(part * per, (part + 1) * per);
				})
			: null;
		const counts = headers?.map(sum) ?? [rows.rows];
		if (returns) this.#sent.push(counts);
		this.#forward.send(rows, counts, headers);
		for (const [place, own] of companions.entries()) {
			const { width, dtype } = own;
			this.#companion(place, { width, dtype: dtype as FloatDtype }).send(own, counts, null);
		}
	}

	/** Number of ranks that rows come from, including this rank if it passes them to itself. */
	get sources(): number {
		return this.#forward.links.receives.length;
	}

	/**
	 * Receives the rows of the next microbatch. `expected`: samples of each source or, if rows are not counted, their number of
	 * rows.
	 */
	receiveForward(expected: readonly number[], { returns, companions = [] }: Passage): Rows {
		const { counted } = this.options;
		const { rows, perPart } = this.#forward.receive(counted ? null : expected, expected);
		const counts = counted ? perPart.map(sum) : [...expected];
		if (returns) this.#received.push(counts);
		return {
			rows: rows!,
			rowsPerSample: perPart.flat(),
			companions: companions.map((form, place) => this.#companion(place, form).receive(counts, []).rows!),
		};
	}

	/** Starts sending back the gradient of the oldest received rows, of which it takes ownership; null: they got no gradient. */
	sendBackward(gradient: Tensor | null): void {
		const counts = this.#received.shift()!;
		using own = gradient;
		this.#backward.send(own, counts, null);
	}

	/** Receives the gradient of the oldest sent rows; null: they got none. */
	receiveBackward(): Tensor | null {
		return this.#backward.receive(this.#sent.shift()!, []).rows;
	}

	/** Waits, after the last microbatch, until no message is in flight. */
	settle(): void {
		this.#forward.settle();
		for (const line of this.#companions) line.settle();
		this.#backward.settle();
	}

	/** After an error: releases the rows that this rank has passed to itself, without waiting for other ranks. */
	[Symbol.dispose](): void {
		this.#forward.drop();
		for (const line of this.#companions) line.drop();
		this.#backward.drop();
		this.#sent.splice(0);
		this.#received.splice(0);
	}
}
