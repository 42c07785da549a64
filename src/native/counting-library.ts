/**
 * A native library that computes nothing: it speaks the ABI, keeps the books of the memory pool and reports every
 * operation. A program that runs on it takes the memory and asks for the operations that it would on a real device,
 * whatever the model's size, but for the workspace a real library takes inside an operation. Integers written by the host, and the row offsets of a sort, can be read back, because the
 * program's own course depends on them; every other value is zero.
 */
import { Dtype, MemoryTag, type OperationName, operations, Status, structs } from "./abi.ts";
import type { DeviceKind, Library, NativeFunction } from "./library.ts";
import { type Layout, layoutOf, writeInt64 } from "./structs.ts";

/** Scalar arguments of an operation by name; of pointers only whether they are null (0) matters. */
export type OperationValues = Readonly<Record<string, number>>;

export interface CountingOptions {
	/** The library it stands for. */
	readonly kind: DeviceKind;
	/** Called with every operation; clearing and copying memory count as fill and axpby. */
	readonly observe: (name: OperationName, values: OperationValues) => void;
}

/** Longest integer array that is remembered, in bytes. */
const remembered = 2 ** 20;
const tagCount = Object.keys(MemoryTag).length;

class Books {
	#next = 4096;
	readonly #live = new Map<number, { readonly bytes: number; readonly tag: number }>();
	readonly liveByTag = new Array<number>(tagCount).fill(0);
	readonly peakByTag = new Array<number>(tagCount).fill(0);
	live = 0;
	peak = 0;
	/** Integers in device memory by address. */
	readonly integers = new Map<number, Int32Array>();

	allocate(bytes: number, tag: number): number {
		const address = this.#next;
		this.#next += Math.max(4096, Math.ceil(bytes / 4096) * 4096);
		this.#live.set(address, { bytes, tag });
		this.#change(bytes, tag);
		return address;
	}

	free(address: number): void {
		const { bytes, tag } = this.#live.get(address)!;
		this.#live.delete(address);
		this.integers.delete(address);
		this.#change(-bytes, tag);
	}

	resetPeak(): void {
		this.peak = this.live;
		this.peakByTag.splice(0, tagCount, ...this.liveByTag);
	}

	get blocks(): number {
		return this.#live.size;
	}

	#change(bytes: number, tag: number): void {
		this.live += bytes;
		this.liveByTag[tag]! += bytes;
		this.peak = Math.max(this.peak, this.live);
		this.peakByTag[tag] = Math.max(this.peakByTag[tag]!, this.liveByTag[tag]!);
	}
}

export function countingLibrary(options: CountingOptions): Library {
	const books = new Books();
	const table: Record<string, NativeFunction> = {};
	for (const [name, fields] of Object.entries(operations)) {
		const layout = layoutOf(fields);
		table[`mimo_${name}`] = (_stream, bytes) => {
			const values = readScalars(bytes as Uint8Array, layout);
			if (name === "moe_sort") books.integers.set(values.offsets!, evenOffsets(values));
			options.observe(name as OperationName, values);
			return Status.ok;
		};
	}
	const own: Record<string, NativeFunction> = {
		mimo_last_error: () => "",
		mimo_device_describe: (_device, out) => {
			const { fields } = layoutOf(structs.device_info);
			const view = viewOf(out);
			(out as Uint8Array).set(new TextEncoder().encode("no device"), 0);
			view.setInt32(fields.find(({ name }) => name === "threads")!.offset, 1, true);
			return Status.ok;
		},
		mimo_memory_allocate: (_stream, bytes, tag, out) => {
			(out as BigUint64Array)[0] = BigInt(books.allocate(Number(bytes), Number(tag)));
			return Status.ok;
		},
		mimo_memory_free: (_stream, address) => {
			books.free(Number(address));
			return Status.ok;
		},
		mimo_memory_statistics_get: (_device, out) => {
			writeStatistics(viewOf(out), books);
			return Status.ok;
		},
		mimo_memory_reset_peak: () => {
			books.resetPeak();
			return Status.ok;
		},
		mimo_memory_set_zero: (_stream, _to, bytes) => {
			options.observe("fill", fillOf(Number(bytes)));
			return Status.ok;
		},
		mimo_memory_copy: (_stream, _to, _from, bytes) => {
			options.observe("axpby", copyOf(Number(bytes)));
			return Status.ok;
		},
		mimo_memory_copy_to_device: (_stream, to, source) => {
			if (source instanceof Int32Array && source.byteLength <= remembered) {
				books.integers.set(Number(to), source.slice());
			}
			return Status.ok;
		},
		mimo_memory_copy_to_host: (_stream, destination, from) => {
			const integers = books.integers.get(Number(from));
			if (integers && destination instanceof Int32Array) destination.set(integers.subarray(0, destination.length));
			else (destination as Uint8Array).fill(0);
			return Status.ok;
		},
	};
	return {
		kind: options.kind,
		source: "counting",
		versions: "",
		symbols: new Proxy({ ...table, ...own }, { get: (known, name: string) => known[name] ?? succeed }),
	};
}

const fillOf = (bytes: number): OperationValues => ({ elements: bytes / 4, dtype: Dtype.f32 });
const copyOf = (bytes: number): OperationValues => ({ rows: 1, width: bytes / 4, x_dtype: Dtype.f32 });

/**
 * `library`, whose operations are timed one by one: each is waited for. `observe` is called with every operation and its
 * seconds.
 */
export function timingLibrary(
	library: Library,
	observe: (name: OperationName, values: OperationValues, seconds: number) => void,
): Library {
	const timed =
		(call: NativeFunction, name: OperationName, valuesOf: (args: Parameters<NativeFunction>) => OperationValues) =>
		(...args: Parameters<NativeFunction>): unknown => {
			const started = performance.now();
			const status = call(...args);
			library.symbols.mimo_stream_synchronize!(args[0]!);
			observe(name, valuesOf(args), (performance.now() - started) / 1000);
			return status;
		};
	const table: Record<string, NativeFunction> = {};
	for (const [name, fields] of Object.entries(operations)) {
		const layout = layoutOf(fields);
		const call = library.symbols[`mimo_${name}`]!;
		table[`mimo_${name}`] = timed(call, name as OperationName, (args) => readScalars(args[1] as Uint8Array, layout));
	}
	const { mimo_memory_set_zero: clear, mimo_memory_copy: copy } = library.symbols;
	table.mimo_memory_set_zero = timed(clear!, "fill", (args) => fillOf(Number(args[2])));
	table.mimo_memory_copy = timed(copy!, "axpby", (args) => copyOf(Number(args[3])));
	return { ...library, symbols: { ...library.symbols, ...table } };
}

/** Any other function: it succeeds, and a handle it has to give is not null. */
const succeed: NativeFunction = (...args) => {
	const out = args.at(-1);
	if (out instanceof BigUint64Array) out[0] = 1n;
	return Status.ok;
};

function viewOf(bytes: unknown): DataView {
	const { buffer, byteOffset, byteLength } = bytes as Uint8Array;
	return new DataView(buffer, byteOffset, byteLength);
}

function readScalars(bytes: Uint8Array, layout: Layout): Record<string, number> {
	const view = viewOf(bytes);
	const values: Record<string, number> = {};
	for (const { name, type, offset } of layout.fields) {
		if (type === "i32") values[name] = view.getInt32(offset, true);
		else if (type === "f32") values[name] = view.getFloat32(offset, true);
		else if (type === "f64") values[name] = view.getFloat64(offset, true);
		else values[name] = Number(view.getBigInt64(offset, true));
	}
	return values;
}

/** Offsets of a sort whose experts get equally many rows, the first ones one more where that does not divide. */
function evenOffsets({ tokens, topk, experts }: OperationValues): Int32Array {
	const rows = tokens! * topk!;
	return Int32Array.from({ length: experts! + 1 }, (_, expert) => Math.ceil((rows * expert) / experts!));
}

function writeStatistics(view: DataView, books: Books): void {
	const values: Readonly<Record<string, number | readonly number[]>> = {
		live_bytes: books.live,
		peak_bytes: books.peak,
		reserved_bytes: books.peak,
		live_blocks: books.blocks,
		system_allocations: 0,
		live_bytes_by_tag: books.liveByTag,
		peak_bytes_by_tag: books.peakByTag,
	};
	for (const { name, offset } of layoutOf(structs.memory_statistics).fields) {
		[values[name]!].flat().forEach((value, index) => {
			writeInt64(view, offset + 8 * index, value);
		});
	}
}
