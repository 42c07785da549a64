/**
 * A native library that computes nothing: it implements the ABI, tracks the memory pool and reports every operation. A program on
 * it allocates the memory and issues the operations that it would on a real device of any size; of the workspace inside
 * operations only what is as large as activations is counted. Integers from the host, the offsets of a sort and the plan of an
 * exchange of rows can be read back, because the program's control flow depends on them; every other value reads as zero.
 */
import { Dtype, MemoryTag, type OperationName, operations, Status, structs } from "./abi.ts";
import { expectedExchange, workspaceBytes } from "./counted-operations.ts";
import type { DeviceKind, Library, NativeFunction } from "./library.ts";
import { type Layout, layoutOf, writeInt64 } from "./structs.ts";

/** Scalar arguments of an operation by name; a pointer is 0 if null, else 1. */
export type OperationValues = Readonly<Record<string, number>>;

export interface CountingOptions {
	/** The library that it imitates. */
	readonly kind: DeviceKind;
	/** Called with every operation; memset and copies are reported as fill and axpby. */
	readonly observe: (name: OperationName, values: OperationValues) => void;
}

/** Longest integer array, in bytes, whose values are kept. */
const remembered = 2 ** 20;
const tagCount = Object.keys(MemoryTag).length;

/** Live row counts of expert inputs: more memory is reserved than operations work on. */
class LiveRows {
	readonly #rows = new Map<number, number>();
	/** Addresses of the last offset, which is the number of rows, by the address of the first offset. */
	readonly #counts = new Map<number, number>();

	set({ local_offsets: offsets, local_experts: experts }: OperationValues, rows: number): void {
		const count = offsets! + 4 * experts!;
		this.#counts.set(offsets!, count);
		for (const address of [offsets!, count]) this.#rows.set(address, rows);
	}

	/** Forgets a block that is freed. */
	forget(address: number): void {
		this.#rows.delete(address);
		this.#rows.delete(this.#counts.get(address) ?? 0);
		this.#counts.delete(address);
	}

	/** An operation's values, with its number of rows replaced by the live ones. */
	in(values: OperationValues): OperationValues {
		const rows = this.#rows.get(values.row_count ?? values.offsets ?? 0);
		return rows === undefined || values.rows === undefined ? values : { ...values, rows };
	}
}

/** Numbers of rows of sorts of tokens by node, and of a node's rows by expert: tokens choose their experts evenly. */
class NodeRows {
	/** By the address of the indices that are sorted. */
	readonly #rows = new Map<number, number>();
	/** Experts of one token on one node that its row goes to, for the last tokens. */
	#choices = 0;
	/** Experts of all nodes, for the last tokens. */
	#experts = 1;

	/** A token goes to each node that any of its experts lies on (docs/spec/moe-performance.md §2.3). */
	tokens({ node_index: at, tokens, topk, nodes, node_experts: experts }: OperationValues): void {
		let without = 1;
		for (let k = 0; k < topk!; k++) without *= Math.max(0, (nodes! - 1) * experts! - k) / (nodes! * experts! - k);
		this.#choices = topk! / (nodes! * (1 - without));
		this.#rows.set(at!, Math.round(tokens! * nodes! * (1 - without)));
		this.#experts = nodes! * experts!;
	}

	/** Without a row count the rows are the tokens of all ranks, whether or not their experts lie on this node. */
	experts({ expert_index: at, row_count: count, topk, experts }: OperationValues, live: number): void {
		const choices = count ? this.#choices : (topk! * experts!) / this.#experts;
		this.#rows.set(at!, Math.round(live * choices));
	}

	/** undefined: every choice is a row. */
	rowsOf({ expert_index: at }: OperationValues): number | undefined {
		return this.#rows.get(at!);
	}

	/** Forgets a block that is freed. */
	forget(address: number): void {
		this.#rows.delete(address);
	}
}

class Books {
	readonly nodes = new NodeRows();
	#next = 4096;
	readonly #live = new Map<number, { readonly bytes: number; readonly tag: number }>();
	readonly liveByTag = new Array<number>(tagCount).fill(0);
	readonly peakByTag = new Array<number>(tagCount).fill(0);
	live = 0;
	peak = 0;
	/** Integers in device memory by address. */
	readonly integers = new Map<number, Int32Array>();
	readonly liveRows = new LiveRows();

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
		this.liveRows.forget(address);
		this.nodes.forget(address);
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
			if (name === "moe_token_nodes") books.nodes.tokens(values);
			if (name === "moe_node_experts") books.nodes.experts(values, books.liveRows.in(values).rows!);
			if (name === "moe_sort") sortRows(books, values);
			if (name === "expert_exchange_plan") planExchange(books, values);
			const live = books.liveRows.in(values);
			const workspace = workspaceBytes(name as OperationName, options.kind === "cpu" ? live : values, options.kind);
			if (workspace > 0) books.free(books.allocate(workspace, MemoryTag.workspace));
			options.observe(name as OperationName, live);
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
			const seconds = (performance.now() - started) / 1000;
			observe(name, valuesOf(args), seconds);
			return status;
		};
	const table: Record<string, NativeFunction> = {};
	const liveRows = new LiveRows();
	const valuesOf = (name: string, stream: unknown, values: OperationValues): OperationValues => {
		if (name !== "expert_exchange_plan" && name !== "moe_sort") return liveRows.in(values);
		const { offsets, experts } = values;
		const sorted = name === "moe_sort" ? { local_offsets: offsets!, local_experts: experts! } : values;
		const count = new Int32Array(1);
		const address = sorted.local_offsets! + 4 * sorted.local_experts!;
		library.symbols.mimo_memory_copy_to_host!(stream as number, count, address, count.byteLength);
		liveRows.set(sorted, count[0]!);
		return values;
	};
	for (const [name, fields] of Object.entries(operations)) {
		const layout = layoutOf(fields);
		const call = library.symbols[`mimo_${name}`]!;
		table[`mimo_${name}`] = timed(call, name as OperationName, (args) =>
			valuesOf(name, args[0], readScalars(args[1] as Uint8Array, layout)),
		);
	}
	const { mimo_memory_free: free } = library.symbols;
	table.mimo_memory_free = (...args) => {
		liveRows.forget(Number(args[1]));
		return free!(...args);
	};
	const { mimo_memory_set_zero: clear, mimo_memory_copy: copy } = library.symbols;
	table.mimo_memory_set_zero = timed(clear!, "fill", (args) => fillOf(Number(args[2])));
	table.mimo_memory_copy = timed(copy!, "axpby", (args) => copyOf(Number(args[3])));
	return { ...library, symbols: { ...library.symbols, ...table } };
}

/** Any other function of the ABI: returns success, and writes a non-null handle where one is returned. */
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

/** The ranges of an exchange of rows, and how many rows of the experts here are live. */
function planExchange(books: Books, values: OperationValues): void {
	const found = expectedExchange(books.integers.get(values.offsets!)!, {
		members: values.members!,
		member: values.member!,
		expertTensor: values.expert_tensor!,
		localExperts: values.local_experts!,
		capacity: values.capacity!,
		regionRows: values.region_rows!,
	});
	books.integers.set(values.out_send!, found.outSend);
	books.integers.set(values.out_receive!, found.outReceive);
	books.integers.set(values.back_send!, found.backSend);
	books.integers.set(values.back_receive!, found.backReceive);
	books.integers.set(values.local_offsets!, found.localOffsets);
	books.liveRows.set(values, found.localOffsets.at(-1)!);
}

/** A sort by expert, of all choices or of as many as the nodes of the rows are known to have. */
function sortRows(books: Books, values: OperationValues): void {
	const { offsets, experts, tokens, topk } = values;
	const rows = books.nodes.rowsOf(values);
	books.integers.set(offsets!, evenOffsets(values, rows ?? tokens! * topk!));
	if (rows !== undefined) books.liveRows.set({ local_offsets: offsets!, local_experts: experts! }, rows);
}

/** Offsets of a sort with equally many rows for each expert, the first experts taking the remainder. */
function evenOffsets({ experts }: OperationValues, rows: number): Int32Array {
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
