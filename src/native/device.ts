/** One device: its streams, memory and operations, typed. Every native call of the program passes through here. */

import { debug, debugging } from "../system/debug.ts";
import { NativeError, UserError } from "../system/errors.ts";
import { MemoryTag, type MemoryTagName, type OperationName, operations, Status, structs } from "./abi.ts";
import { HostMemory } from "./host-memory.ts";
import type { Library, NativeFunction } from "./library.ts";
import { Allocation, addressOf, type DeviceMemory } from "./memory.ts";
import { type Layout, layoutOf, readStruct, writeInt64, zeroTerminated } from "./structs.ts";

interface FieldValue {
	ptr: DeviceMemory | null;
	i64: number | bigint;
	i32: number;
	f32: number;
	f64: number;
}

/** Arguments of an operation by name: every field of its struct, none forgotten. */
export type OperationArgs<Name extends OperationName> = {
	readonly [Field in keyof (typeof operations)[Name]]: (typeof operations)[Name][Field] extends keyof FieldValue
		? FieldValue[(typeof operations)[Name][Field]]
		: never;
};

export interface DeviceInfo {
	readonly name: string;
	readonly instructions: string;
	readonly memoryBytes: number;
	readonly threads: number;
	readonly deviceCount: number;
}

export interface MemoryStatistics {
	readonly liveBytes: number;
	readonly peakBytes: number;
	readonly reservedBytes: number;
	readonly liveBlocks: number;
	readonly systemAllocations: number;
	readonly liveBytesByTag: Readonly<Record<MemoryTagName, number>>;
	readonly peakBytesByTag: Readonly<Record<MemoryTagName, number>>;
}

interface Operation {
	readonly call: NativeFunction;
	readonly layout: Layout;
	readonly bytes: Uint8Array;
	readonly view: DataView;
}

/** Observes a device while it is profiled. */
export interface DeviceTracer {
	/** An operation will be queued next. */
	beforeOperation(stream: Stream): void;
	/** An operation has been queued (a CPU library has also done it). */
	operation(name: OperationName, stream: Stream): void;
	/** The next operations belong to this part of a model, such as "layer.3 backward". */
	scope(name: string): void;
	/** Work queued on the stream from now on waits for a collective or message, of which collective() tells. */
	beforeWait(stream: Stream): void;
	/** A collective or message of a group: started, and done when `wait` ran. */
	collective(call: {
		readonly group: string;
		readonly kind: string;
		readonly sequence: number;
		readonly bytes: number;
		readonly began: number;
	}): void;
}

/** A moment in a stream's work. */
export class DeviceEvent implements Disposable {
	constructor(
		private readonly library: Library,
		/** Known to src/native alone. */
		readonly handle: number,
	) {}

	/** Records the moment when the work queued on the stream so far is done. */
	record(stream: Stream): void {
		check(this.library, "mimo_event_record", this.handle, stream.handle);
	}

	/** Milliseconds from an earlier moment; both must have passed. */
	millisecondsSince(earlier: DeviceEvent): number {
		const out = new Float32Array(1);
		check(this.library, "mimo_event_elapsed", earlier.handle, this.handle, out);
		return out[0]!;
	}

	[Symbol.dispose](): void {
		check(this.library, "mimo_event_destroy", this.handle);
	}
}

/** A queue of work on a device. Work of one stream runs in order. */
export class Stream {
	constructor(
		/** Known to src/native alone. */
		readonly handle: number,
		readonly name: string,
	) {}
}

export class Device implements Disposable {
	readonly #operations = new Map<OperationName, Operation>();
	readonly #streams: Stream[] = [];
	#closed = false;
	readonly #inUse = inUseBuffer();
	/** Takes the address of new memory: hundreds of tensors a step need no array, bigint and function each. */
	readonly #allocated = new BigUint64Array(1);
	readonly #allocatedWords = new Uint32Array(this.#allocated.buffer);
	readonly #free = (address: number) => {
		if (!this.#closed) this.#call("mimo_memory_free", this.stream.handle, address);
	};
	/** null: nothing has gone to the host's memory yet. */
	#hostMemory: HostMemory | null = null;
	/** null: the device is not profiled. */
	tracer: DeviceTracer | null = null;
	/** Stream that operations use unless told otherwise. */
	readonly stream: Stream;

	private constructor(
		readonly library: Library,
		readonly handle: number,
	) {
		for (const [name, fields] of Object.entries(operations)) {
			const layout = layoutOf(fields);
			const bytes = new Uint8Array(layout.bytes);
			this.#operations.set(name as OperationName, {
				call: library.symbols[`mimo_${name}`]!,
				layout,
				bytes,
				view: new DataView(bytes.buffer),
			});
		}
		this.stream = this.createStream("compute");
	}

	/** Opens device `index`; `threads` CPU worker threads (0 = one a core). */
	static open(library: Library, options: { index?: number; threads?: number } = {}): Device {
		const out = new BigUint64Array(1);
		check(library, "mimo_device_open", options.index ?? 0, options.threads ?? 0, out);
		return new Device(library, Number(out[0]));
	}

	/** Whether its library only counts: it has sizes and no values, so that values for it need not be made. */
	get counts(): boolean {
		return this.library.source === "counting";
	}

	createStream(name: string, priority = 0): Stream {
		const out = new BigUint64Array(1);
		this.#call("mimo_stream_create", this.handle, priority, out);
		const stream = new Stream(Number(out[0]), name);
		this.#streams.push(stream);
		return stream;
	}

	createEvent(): DeviceEvent {
		const out = new BigUint64Array(1);
		this.#call("mimo_event_create", this.handle, out);
		return new DeviceEvent(this.library, Number(out[0]));
	}

	/** Work queued on `stream` from now on waits for the moment. */
	wait(event: DeviceEvent, stream: Stream = this.stream): void {
		this.#call("mimo_stream_wait_event", stream.handle, event.handle);
	}

	/** Where contents of this device's memory wait. */
	get hostMemory(): HostMemory {
		this.#hostMemory ??= new HostMemory(this, (name, ...args) => this.#call(name, ...args));
		return this.#hostMemory;
	}

	/** Queues an operation. Pointer fields take tensors (or null where its header says so). */
	run<Name extends OperationName>(name: Name, args: OperationArgs<Name>, stream: Stream = this.stream): void {
		const { call, layout, bytes, view } = this.#operations.get(name)!;
		const values = args as Readonly<Record<string, DeviceMemory | number | bigint | null>>;
		for (const { name: field, type, offset } of layout.fields) {
			const value = values[field];
			switch (type) {
				case "ptr":
					writeInt64(view, offset, addressOf(value as DeviceMemory | null));
					break;
				case "i64":
					writeInt64(view, offset, value as number | bigint);
					break;
				case "i32":
					view.setInt32(offset, value as number, true);
					break;
				case "f32":
					view.setFloat32(offset, value as number, true);
					break;
				default:
					view.setFloat64(offset, value as number, true);
			}
		}
		if (debugging(4)) debug(4, `${name} ${describe(values)}`);
		this.tracer?.beforeOperation(stream);
		const status = call(stream.handle, bytes) as number;
		if (status !== Status.ok) throw new NativeError(name, status, String(this.library.symbols.mimo_last_error!()));
		this.tracer?.operation(name, stream);
	}

	allocate(bytes: number, tag: MemoryTagName): Allocation {
		this.#call("mimo_memory_allocate", this.stream.handle, bytes, MemoryTag[tag], this.#allocated);
		const [low, high] = [this.#allocatedWords[0]!, this.#allocatedWords[1]!];
		return new Allocation(bytes, low + high * 2 ** 32, this.#free);
	}

	/** Copies host bytes to the device: later work sees them, and `source` may change when it returns. */
	copyToDevice(destination: DeviceMemory, source: NodeJS.TypedArray): void {
		if (source.byteLength === 0) return;
		this.#checkSpan(destination, source.byteLength);
		this.#call("mimo_memory_copy_to_device", this.stream.handle, addressOf(destination), source, source.byteLength);
	}

	/** Fills a host array from the device; done when it returns. */
	copyToHost(destination: NodeJS.TypedArray, source: DeviceMemory): void {
		if (destination.byteLength === 0) return;
		this.#checkSpan(source, destination.byteLength);
		this.#call("mimo_memory_copy_to_host", this.stream.handle, destination, addressOf(source), destination.byteLength);
	}

	copy(destination: DeviceMemory, source: DeviceMemory, bytes: number): void {
		this.#checkSpan(destination, bytes);
		this.#checkSpan(source, bytes);
		this.#call("mimo_memory_copy", this.stream.handle, addressOf(destination), addressOf(source), bytes);
	}

	setZero(destination: DeviceMemory, bytes: number): void {
		this.#checkSpan(destination, bytes);
		this.#call("mimo_memory_set_zero", this.stream.handle, addressOf(destination), bytes);
	}

	/** Waits until everything queued on the stream is done. */
	synchronize(stream: Stream = this.stream): void {
		this.#call("mimo_stream_synchronize", stream.handle);
	}

	describe(): DeviceInfo {
		const raw = this.#read("mimo_device_describe", layoutOf(structs.device_info));
		return {
			name: raw.name as string,
			instructions: raw.instructions as string,
			memoryBytes: raw.memory_bytes as number,
			threads: raw.threads as number,
			deviceCount: raw.device_count as number,
		};
	}

	memoryStatistics(): MemoryStatistics {
		const raw = this.#read("mimo_memory_statistics_get", layoutOf(structs.memory_statistics));
		const byTag = (values: number[]) =>
			Object.fromEntries(Object.entries(MemoryTag).map(([name, tag]) => [name, values[tag]!])) as Record<
				MemoryTagName,
				number
			>;
		return {
			liveBytes: raw.live_bytes as number,
			peakBytes: raw.peak_bytes as number,
			reservedBytes: raw.reserved_bytes as number,
			liveBlocks: raw.live_blocks as number,
			systemAllocations: raw.system_allocations as number,
			liveBytesByTag: byTag(raw.live_bytes_by_tag as number[]),
			peakBytesByTag: byTag(raw.peak_bytes_by_tag as number[]),
		};
	}

	/** Live and reserved bytes alone, for a tracer that asks at every layer. */
	memoryInUse(): Pick<MemoryStatistics, "liveBytes" | "reservedBytes"> {
		const { bytes, live, reserved } = this.#inUse;
		this.#call("mimo_memory_statistics_get", this.handle, bytes);
		return { liveBytes: this.#inUse.read(live), reservedBytes: this.#inUse.read(reserved) };
	}

	resetPeakMemory(): void {
		this.#call("mimo_memory_reset_peak", this.handle);
	}

	/** Gives cached memory back to the system. */
	trimMemory(): void {
		this.#call("mimo_memory_trim", this.handle);
	}

	/** Whether results must repeat bit for bit even where vendor libraries would add in any order. */
	setDeterministic(deterministic: boolean): void {
		this.#call("mimo_device_set_deterministic", this.handle, deterministic ? 1 : 0);
	}

	/**
	 * Takes these algorithms of vendor libraries in place of earlier ones, as mimo_device_set_algorithms says; a line each.
	 * A call without such a line takes the library's first answer.
	 */
	setAlgorithms(choices: string): void {
		this.#call("mimo_device_set_algorithms", this.handle, zeroTerminated(choices));
	}

	/**
	 * Times the algorithms of all products and attentions so far that have no choice, for `timedAlgorithms`. Returns how many
	 * there was no memory for.
	 */
	timeAlgorithms(): number {
		const leftOut = new Int32Array(1);
		this.#call("mimo_device_time_algorithms", this.handle, this.stream.handle, leftOut);
		return leftOut[0]!;
	}

	/** The choices that were timed, in the form that `setAlgorithms` takes, with the times that mimo/algorithms.h names behind. */
	timedAlgorithms(): string {
		const bytes = new BigInt64Array(1);
		this.#call("mimo_device_timed_algorithms", this.handle, new Uint8Array(1), 0, bytes);
		const text = new Uint8Array(Number(bytes[0]));
		if (text.length === 0) return "";
		this.#call("mimo_device_timed_algorithms", this.handle, text, text.length, bytes);
		return new TextDecoder().decode(text);
	}

	/**
	 * Whether runs of operations that repeat are launched as CUDA graphs; throws a UserError on a device without graphs.
	 */
	setGraphs(wanted: boolean): void {
		if (wanted && this.library.kind === "cpu") {
			throw new UserError("CUDA graphs need a GPU, and this run is on the CPU library.");
		}
		this.#call("mimo_stream_set_graphs", this.stream.handle, wanted ? 1 : 0);
	}

	/** Refuses to hold more than `bytes` live; 0 lifts the limit. */
	limitMemory(bytes: number): void {
		this.#call("mimo_memory_limit", this.handle, bytes);
	}

	[Symbol.dispose](): void {
		if (this.#closed) return;
		this.#closed = true;
		for (const stream of this.#streams) this.#call("mimo_stream_destroy", stream.handle);
		this.#hostMemory?.[Symbol.dispose]();
		this.#call("mimo_device_close", this.handle);
	}

	#checkSpan(memory: DeviceMemory, bytes: number): void {
		if (memory.byteOffset + bytes > memory.allocation.bytes) {
			throw new RangeError(`A copy of ${bytes} bytes passes the end of a block of ${memory.allocation.bytes}.`);
		}
	}

	#read(name: string, layout: Layout): ReturnType<typeof readStruct> {
		const bytes = new Uint8Array(layout.bytes);
		this.#call(name, this.handle, bytes);
		return readStruct(bytes, layout);
	}

	#call(name: string, ...args: Parameters<NativeFunction>): void {
		check(this.library, name, ...args);
	}
}

/** A buffer for `memoryInUse`, and the places of its numbers. */
function inUseBuffer() {
	const { bytes: size, fields } = layoutOf(structs.memory_statistics);
	const bytes = new Uint8Array(size);
	const offsetOf = (field: string) => fields.find(({ name }) => name === field)!.offset;
	const words = new Uint32Array(bytes.buffer);
	return {
		bytes,
		/** Without a bigint on the way. */
		read: (offset: number) => words[offset / 4]! + words[offset / 4 + 1]! * 2 ** 32,
		live: offsetOf("live_bytes"),
		reserved: offsetOf("reserved_bytes"),
	};
}

/** Calls a function of the library; a status that is not ok is thrown as a NativeError. */
export function check(library: Library, name: string, ...args: Parameters<NativeFunction>): void {
	if (debugging(4)) debug(4, name);
	const status = library.symbols[name]!(...args) as number;
	if (status !== Status.ok) throw new NativeError(name, status, String(library.symbols.mimo_last_error!()));
}

function describe(values: Readonly<Record<string, DeviceMemory | number | bigint | null>>): string {
	return Object.entries(values)
		.filter(([, value]) => typeof value !== "object")
		.map(([name, value]) => `${name}=${value}`)
		.join(" ");
}
