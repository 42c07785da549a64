/** A Group of several ranks: collectives through shared memory, or between GPUs over the run's backend. */
import { RowStage as RowStageCode, type RowTransportName } from "../native/abi.ts";
import type { Device } from "../native/device.ts";
import { NativeGroup, type Ticket } from "../native/group.ts";
import type { Run } from "../native/run.ts";
import { dtypeBytes, type Tensor } from "../tensor/index.ts";
import type { DeviceRanges, Group, Pending, Reduction, RowRanges, RowStage, RowsOfMember } from "./group.ts";

export class RunGroup implements Group, Disposable {
	readonly rank: number;
	readonly #native: NativeGroup;
	#rowTransport: RowTransportName | null = null;

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
		this.#requireAlike(send, receive);
		this.#requireRows(send, sendRows);
		this.#requireRows(receive, receiveRows);
		const rows = Int32Array.from([
			...sendRows.offsets,
			...sendRows.counts,
			...receiveRows.offsets,
			...receiveRows.counts,
		]);
		const rowBytes = send.width * dtypeBytes[send.dtype];
		return this.#pending(this.#native.allToAll(send, receive, rows, rowBytes), [send, receive]);
	}

	exchangeRows(send: RowsOfMember, receive: RowsOfMember, ranges: DeviceRanges, stage: RowStage): Pending {
		const beside = send.beside && receive.beside ? { x: send.beside, y: receive.beside } : null;
		this.#requireAlike(send.rows, receive.rows);
		if (beside) this.#requireAlike(beside.x, beside.y);
		for (const table of [ranges.out, ranges.in]) {
			this.#requireContiguous(table);
			if (table.dtype !== "i32" || table.elements !== ranges.in.elements || table.elements % (3 * this.size) !== 0) {
				throw new RangeError(`${this.name}: [${table.shape}] ${table.dtype} are no ranges of ${this.size} members.`);
			}
		}
		const rowBytes = (x: Tensor) => x.width * dtypeBytes[x.dtype];
		const ticket = this.#native.exchangeRows(
			{
				x: send.rows,
				y: receive.rows,
				beside_x: beside?.x ?? null,
				beside_y: beside?.y ?? null,
				send_ranges: ranges.out,
				receive_ranges: ranges.in,
				ranges: ranges.in.elements / (3 * this.size),
				row_bytes: rowBytes(send.rows),
				beside_row_bytes: beside ? rowBytes(beside.x) : 0,
				x_rows: send.rows.rows,
				y_rows: receive.rows.rows,
				stage_rows: stage.rows,
				stage: RowStageCode[stage.at],
			},
			ranges.onHost,
		);
		const tensors = [send.rows, send.beside, receive.rows, receive.beside, ranges.out, ranges.in];
		return this.#pending(
			ticket,
			tensors.filter((tensor) => tensor !== null),
		);
	}

	rowTransport(): RowTransportName {
		this.#rowTransport ??= this.#native.rowTransport();
		return this.#rowTransport;
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

	/** Every member passes the same number of values. */
	exchange(values: Int32Array): Int32Array[] {
		const all = new Int32Array(this.size * values.length);
		this.#native.exchange(values, all);
		return this.ranks.map((_, member) => all.subarray(member * values.length, (member + 1) * values.length));
	}

	contribute(values: Int32Array): void {
		this.#native.contribute(values);
	}

	[Symbol.dispose](): void {
		this.#native[Symbol.dispose]();
	}

	/** Keeps the tensors alive until the call is done, whatever their owners do meanwhile. */
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

	/** Throws unless rows of `send` and `receive` have equal dtype and width. */
	#requireAlike(send: Tensor, receive: Tensor): void {
		this.#requireContiguous(send);
		this.#requireContiguous(receive);
		if (send.dtype !== receive.dtype || send.width !== receive.width) {
			throw new RangeError(
				`${this.name}: rows of ${send.width} ${send.dtype} cannot become rows of ${receive.width} ${receive.dtype}.`,
			);
		}
	}

	/** Throws unless `whole` has room for one `part` a member. */
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
