/** A group of ranks at the C ABI (mimo/collectives.h, mimo/exchange_rows.h): typed calls on device memory. */
import {
	Dtype,
	type DtypeName,
	Reduction,
	type ReductionName,
	RowTransport,
	type RowTransportName,
	structs,
} from "./abi.ts";
import { check, type Device } from "./device.ts";
import { addressOf, type DeviceMemory } from "./memory.ts";
import type { Run } from "./run.ts";
import { layoutOf, writeStruct } from "./structs.ts";

/** Names a started call of a group. */
export type Ticket = number;

const rowExchange = layoutOf(structs.row_exchange);

/** mimo_row_exchange: device memory of its pointers, null where the header says so. */
export type RowExchangeArgs = {
	readonly [Field in keyof typeof structs.row_exchange]: (typeof structs.row_exchange)[Field] extends "ptr"
		? DeviceMemory | null
		: number;
};

export class NativeGroup implements Disposable {
	readonly #ticket = new BigInt64Array(1);
	readonly #rows = new Uint8Array(rowExchange.bytes);
	#closed = false;

	private constructor(
		private readonly device: Device,
		private readonly handle: number,
	) {}

	/** `ranks`: global ranks of the members, at least two, this process's among them. */
	static create(run: Run, device: Device, name: string, ranks: readonly number[]): NativeGroup {
		const out = new BigUint64Array(1);
		const members = Int32Array.from(ranks);
		check(run.library, "mimo_group_create", run.handle, Buffer.from(`${name}\0`), members, members.length, out);
		return new NativeGroup(device, Number(out[0]));
	}

	allReduce(x: DeviceMemory, elements: number, dtype: DtypeName, reduction: ReductionName): Ticket {
		return this.#start("all_reduce", addressOf(x), elements, Dtype[dtype], Reduction[reduction]);
	}

	/** `elements` of y. */
	reduceScatter(x: DeviceMemory, y: DeviceMemory, elements: number, dtype: DtypeName): Ticket {
		return this.#start("reduce_scatter", addressOf(x), addressOf(y), elements, Dtype[dtype]);
	}

	/** `bytes` of x. */
	allGather(x: DeviceMemory, y: DeviceMemory, bytes: number): Ticket {
		return this.#start("all_gather", addressOf(x), addressOf(y), bytes);
	}

	broadcast(x: DeviceMemory, bytes: number, root: number): Ticket {
		return this.#start("broadcast", addressOf(x), bytes, root);
	}

	/** `rows` [4, size]: send offsets, send counts, receive offsets, receive counts. */
	allToAll(x: DeviceMemory, y: DeviceMemory, rows: Int32Array, rowBytes: number): Ticket {
		return this.#start("all_to_all", addressOf(x), addressOf(y), rows, rowBytes);
	}

	/** `ranges` [2, size, ranges, 3]: those of the device, for the row transport that reads counts. */
	exchangeRows(rows: RowExchangeArgs, ranges: Int32Array | null): Ticket {
		writeStruct(this.#rows, rowExchange, (field) => {
			const value = rows[field as keyof RowExchangeArgs];
			return typeof value === "number" ? value : addressOf(value);
		});
		return this.#start("exchange_rows", this.#rows, ranges);
	}

	/** Waits for the other members. */
	rowTransport(): RowTransportName {
		const out = new Int32Array(1);
		check(this.device.library, "mimo_group_row_transport", this.handle, this.device.stream.handle, out);
		const names = Object.keys(RowTransport) as RowTransportName[];
		return names.find((name) => RowTransport[name] === out[0])!;
	}

	send(x: DeviceMemory, bytes: number, to: number): Ticket {
		return this.#start("send", addressOf(x), bytes, to);
	}

	receive(x: DeviceMemory, bytes: number, from: number): Ticket {
		return this.#start("receive", addressOf(x), bytes, from);
	}

	wait(ticket: Ticket): void {
		check(this.device.library, "mimo_group_wait", this.handle, this.device.stream.handle, ticket);
	}

	barrier(): void {
		check(this.device.library, "mimo_group_barrier", this.handle);
	}

	/** Fills `all` [size, values.length] with every member's values. */
	exchange(values: Int32Array, all: Int32Array): void {
		check(this.device.library, "mimo_group_exchange", this.handle, values, all, values.byteLength);
	}

	/** Gives this member's values to the members that exchange, without waiting. */
	contribute(values: Int32Array): void {
		check(this.device.library, "mimo_group_exchange", this.handle, values, null, values.byteLength);
	}

	[Symbol.dispose](): void {
		if (this.#closed) return;
		this.#closed = true;
		check(this.device.library, "mimo_group_destroy", this.handle);
	}

	#start(name: string, ...args: (number | NodeJS.TypedArray | null)[]): Ticket {
		const { library, stream } = this.device;
		check(library, `mimo_group_${name}`, this.handle, stream.handle, ...args, this.#ticket);
		return Number(this.#ticket[0]);
	}
}
