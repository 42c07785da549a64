/** A group of ranks of a run: its collectives, through shared memory, or between GPUs as the run's backend says. */
import type { Device } from "../native/device.ts";
import { NativeGroup, type Ticket } from "../native/group.ts";
import type { Run } from "../native/run.ts";
import { dtypeBytes, type Tensor } from "../tensor/tensor.ts";
import type { Group, Pending, Reduction, RowRanges } from "./group.ts";

export class RunGroup implements Group, Disposable {
	readonly rank: number;
	readonly #native: NativeGroup;

	/** `ranks`: global ranks of the members, at least two; this process is `globalRank`. */
	constructor(
		run: Run,
		device: Device,
		globalRank: number,
		readonly name: string,
		readonly ranks: readonly number[],
	) {
		this.rank = ranks.indexOf(globalRank);
		this.#native = NativeGroup.create(run, device, name, ranks);
	}

	get size(): number {
		return this.ranks.length;
	}

	allReduce(x: Tensor, reduction: Reduction = "sum"): Pending {
		this.#requireContiguous(x);
		return this.#pending(this.#native.allReduce(x, x.elements, x.dtype, reduction), [x]);
	}

	reduceScatter(x: Tensor, y: Tensor): Pending {
		this.#requireParts(x, y);
		return this.#pending(this.#native.reduceScatter(x, y, y.elements, y.dtype), [x, y]);
	}

	allGather(x: Tensor, y: Tensor): Pending {
		this.#requireParts(y, x);
		return this.#pending(this.#native.allGather(x, y, x.bytes), [x, y]);
	}

	broadcast(x: Tensor, root: number): Pending {
		this.#requireContiguous(x);
		return this.#pending(this.#native.broadcast(x, x.bytes, root), [x]);
	}

	allToAll(send: Tensor, sendRows: RowRanges, receive: Tensor, receiveRows: RowRanges): Pending {
		this.#requireContiguous(send);
		this.#requireContiguous(receive);
		this.#requireRows(send, sendRows);
		this.#requireRows(receive, receiveRows);
		if (send.dtype !== receive.dtype || send.width !== receive.width) {
			throw new RangeError(`${this.name}: all-to-all from rows of ${send.width} to rows of ${receive.width} elements.`);
		}
		const rows = Int32Array.from([
			...sendRows.offsets,
			...sendRows.counts,
			...receiveRows.offsets,
			...receiveRows.counts,
		]);
		const rowBytes = send.width * dtypeBytes[send.dtype];
		return this.#pending(this.#native.allToAll(send, receive, rows, rowBytes), [send, receive]);
	}

	send(x: Tensor, to: number): Pending {
		this.#requireContiguous(x);
		return this.#pending(this.#native.send(x, x.bytes, to), [x]);
	}

	receive(x: Tensor, from: number): Pending {
		this.#requireContiguous(x);
		return this.#pending(this.#native.receive(x, x.bytes, from), [x]);
	}

	barrier(): void {
		this.#native.barrier();
	}

	/** All members give equally many. */
	exchange(values: Int32Array): Int32Array[] {
		const all = new Int32Array(this.size * values.length);
		this.#native.exchange(values, all);
		return this.ranks.map((_, member) => all.subarray(member * values.length, (member + 1) * values.length));
	}

	tell(values: Int32Array): void {
		this.#native.tell(values);
	}

	[Symbol.dispose](): void {
		this.#native[Symbol.dispose]();
	}

	/** The tensors live until the call is done, whatever their owners do meanwhile. */
	#pending(ticket: Ticket, tensors: readonly Tensor[]): Pending {
		const held = tensors.map((tensor) => tensor.share());
		const native = this.#native;
		return {
			wait() {
				if (held.length === 0) return;
				try {
					native.wait(ticket);
				} finally {
					for (const tensor of held.splice(0)) tensor[Symbol.dispose]();
				}
			},
		};
	}

	#requireContiguous(x: Tensor): void {
		if (!x.contiguous) throw new RangeError(`${this.name}: a collective takes contiguous tensors.`);
	}

	/** `whole` holds a part like `part` for each member. */
	#requireParts(whole: Tensor, part: Tensor): void {
		this.#requireContiguous(whole);
		this.#requireContiguous(part);
		if (whole.dtype !== part.dtype || whole.elements !== part.elements * this.size) {
			throw new RangeError(
				`${this.name}: ${whole.elements} ${whole.dtype} elements are not ${this.size} parts of ${part.elements} ${part.dtype}.`,
			);
		}
	}

	#requireRows(x: Tensor, { offsets, counts }: RowRanges): void {
		const inside = offsets.every((offset, member) => offset >= 0 && offset + counts[member]! <= x.rows);
		if (offsets.length !== this.size || counts.length !== this.size || !inside) {
			throw new RangeError(`${this.name}: row ranges [${offsets}] + [${counts}] do not lie in ${x.rows} rows.`);
		}
	}
}
