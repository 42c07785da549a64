/** Entry point of a data thread: runs some of a rank's logical workers and sends their events to the loader. */
import { runOn } from "../../../native/affinity.ts";
import { Images } from "../../../native/images.ts";
import { openLibrary } from "../../../native/library.ts";
import { UserError } from "../../../system/errors.ts";
import { showReads } from "../../../system/read-watch.ts";
import { SampleError } from "../errors.ts";
import type { Keyed } from "../sample.ts";
import { openStorage, type StorageConfiguration } from "../storage/open.ts";
import type { WorkerStream } from "../worker.ts";
import { type LoaderConfiguration, Pipelines } from "./configuration.ts";
import { raising, reporting } from "./skipped.ts";
import { checkSettings, decodePosition, encodePosition, type WorkerPosition } from "./state.ts";

declare const self: Worker;

const streams = new Map<number, EventStream>();

function send(message: FromThread, transfer: ArrayBuffer[] = []): void {
	postMessage(message, transfer);
}

async function open(message: Extract<ToThread, { type: "open" }>): Promise<void> {
	const { configuration, workers, onFailure } = message;
	if (message.cpus !== null) runOn(message.cpus);
	showReads(message.watch);
	const images = new Images(await openLibrary("cpu"));
	images.boundMemory(message.decodingBytes);
	const remark = (sentence: string) => send({ type: "remark", sentence });
	const pipelines = new Pipelines(configuration, openStorage(message.storage), images, remark);
	const settings = pipelines.settings();
	if (message.saved !== null) checkSettings(message.saved, settings);
	let length = 0;
	for (const { number, rank, id, position, skip } of workers) {
		const report = reporting({ rank, worker: id }, (skipped) => send({ type: "skipped", skipped }));
		const stream = pipelines.stream(rank, id, onFailure === "skip" ? report : raising(report));
		length = stream.dataset.lengthOfRank();
		streams.set(number, new EventStream(stream, position === null ? null : decodePosition(position), skip));
	}
	send({ type: "opened", settings, length });
}

function answer(message: ToThread): void {
	if (message.type === "open") return;
	const stream = streams.get(message.worker)!;
	if (message.type === "position") {
		const position = encodePosition(stream.position(message.event));
		send({ type: "position", request: message.request, position });
		return;
	}
	stream.forget(message.needed);
	const item = stream.next();
	const detached = detach(item);
	const transfer = new Set(transferable(item));
	if (detached) transfer.add(detached);
	send({ type: "event", worker: message.worker, item, bytes: item === null ? 0 : byteLength(item) }, [...transfer]);
}

function fail(error: unknown): void {
	const { message, stack = "" } = error instanceof Error ? error : new Error(String(error));
	// The message of a SampleError names the sample.
	const isUserError = error instanceof UserError || error instanceof SampleError;
	send({ type: "failed", sentence: message, isUserError, stack });
}

self.onmessage = async ({ data }: MessageEvent<ToThread>) => {
	try {
		if (data.type === "open") await open(data);
		else answer(data);
	} catch (error) {
		fail(error);
	}
};

// Transfers outputs to another thread: views of larger buffers, such as mapped files, are copied into one new buffer.

/** The buffers that a single array of an item spans, which can be transferred; other arrays are copied. */
function transferable(item: unknown): ArrayBuffer[] {
	const owners = new Map<ArrayBuffer, number>();
	visit(item, (array) => {
		const { buffer } = array;
		if (buffer instanceof ArrayBuffer)
			owners.set(buffer, array.byteLength === buffer.byteLength ? (owners.get(buffer) ?? 0) + 1 : 2);
	});
	return [...owners].flatMap(([buffer, count]) => (count === 1 ? [buffer] : []));
}

/** A property whose array is a view of a larger buffer, such as a mapped file. */
interface Part {
	readonly owner: Record<string, unknown>;
	readonly name: string;
	readonly bytes: Uint8Array;
}

/**
 * Copies arrays that are views of larger buffers into one new buffer, so that the larger buffers are not transferred. Returns
 * the new buffer, or null without such arrays.
 */
function detach(value: unknown): ArrayBuffer | null {
	const parts: Part[] = [];
	collect(value, parts);
	if (parts.length === 0) return null;
	const buffer = new ArrayBuffer(parts.reduce((sum, { bytes }) => sum + bytes.byteLength, 0));
	let at = 0;
	for (const { owner, name, bytes } of parts) {
		const copy = new Uint8Array(buffer, at, bytes.byteLength);
		copy.set(bytes);
		owner[name] = copy;
		at += bytes.byteLength;
	}
	return buffer;
}

function collect(value: unknown, parts: Part[]): void {
	if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return;
	if (Array.isArray(value) && typeof value[0] === "number") return;
	const owner = value as Record<string, unknown>;
	for (const name of Object.keys(owner)) {
		const item = owner[name];
		if (item instanceof Uint8Array && item.byteLength !== item.buffer.byteLength)
			parts.push({ owner, name, bytes: item });
		else if (typeof item === "object") collect(item, parts);
	}
}

/** Bytes of all arrays and strings of an item, approximately its size in memory. */
function byteLength(item: unknown): number {
	let bytes = 0;
	visit(item, (array) => {
		bytes += array.byteLength;
	});
	return bytes + 1024;
}

function visit(value: unknown, onArray: (array: ArrayBufferView) => void): void {
	if (ArrayBuffer.isView(value)) onArray(value);
	else if (Array.isArray(value)) {
		if (typeof value[0] === "number") return;
		for (const item of value) visit(item, onArray);
	} else if (value !== null && typeof value === "object") {
		for (const item of Object.values(value)) visit(item, onArray);
	}
}

// The stream of a worker as numbered events (outputs and ends of passes). The positions before events are kept until
// the consumer has passed them, so that a state can be saved at the consumer's event although the worker runs ahead.

/** An output, or null at the end of a pass. */
type StreamEvent = Keyed | null;

export class EventStream {
	readonly #stream: WorkerStream<Keyed>;
	#pass: Generator<Keyed, void, void> | null = null;
	/** Number of the next event, and the positions before events that may still be requested. */
	#next = 0;
	readonly #positions = new Map<number, WorkerPosition>();
	#oldest = 0;

	/** Starts at a position and discards the first `skip` outputs. */
	constructor(stream: WorkerStream<Keyed>, position: WorkerPosition | null, skip = 0) {
		this.#stream = stream;
		if (position !== null) stream.restore(position);
		for (let i = 0; i < skip; i++) this.#advance();
		this.#keep();
	}

	/** The next event. After the end of a pass this starts the next pass. */
	next(): StreamEvent {
		const event = this.#advance();
		this.#next++;
		this.#keep();
		return event;
	}

	#advance(): StreamEvent {
		this.#pass ??= this.#stream.pass();
		const step = this.#pass.next();
		if (!step.done) return step.value;
		this.#pass = null;
		return null;
	}

	#keep(): void {
		this.#positions.set(this.#next, this.#stream.save());
	}

	/** Position before event `number`. */
	position(number: number): WorkerPosition {
		const position = this.#positions.get(number);
		if (position === undefined) throw new Error(`The position before event ${number} of a data worker was forgotten.`);
		return position;
	}

	/** Drops the positions before event `number`. */
	forget(number: number): void {
		for (; this.#oldest < number; this.#oldest++) this.#positions.delete(this.#oldest);
	}
}

// Messages between the loader and its threads.

/** The report of a skipped sample. */
export interface SkippedSample {
	readonly rank: number;
	/** null: all workers of the rank. */
	readonly worker: number | null;
	/** The failure, as a sentence. */
	readonly reason: string;
	/** Whether a setting leaves such samples out, so that they do not count as damaged. */
	readonly expected: boolean;
	/** Shard and key of every lost sample; empty if the failing step had no sample. */
	readonly samples: readonly { readonly dataset: string; readonly shard: string; readonly key: string }[];
}

/** A logical worker of a data rank, and the encoded position at which it starts. */
export interface OpenedWorker {
	/** Number among all workers of the loader. */
	readonly number: number;
	readonly rank: number;
	/** Number among the workers of the data rank. */
	readonly id: number;
	readonly position: unknown | null;
	/** Number of outputs to discard at the start. */
	readonly skip: number;
}

export type ToThread =
	| {
			readonly type: "open";
			readonly configuration: LoaderConfiguration;
			readonly storage: StorageConfiguration;
			/** Shows which local file the thread reads. */
			readonly watch: SharedArrayBuffer;
			/** CPUs that the thread runs on; null: wherever its process does. */
			readonly cpus: readonly number[] | null;
			/** Logical workers that the thread runs. */
			readonly workers: readonly OpenedWorker[];
			readonly onFailure: "skip" | "raise";
			/** Most bytes of images that the process decodes at the same time. */
			readonly decodingBytes: number;
			/** Settings of the state to continue from; null = from the beginning. */
			readonly saved: Readonly<Record<string, string>> | null;
	  }
	/** Requests the next event of a worker. Positions before event `needed` may be dropped. */
	| { readonly type: "pull"; readonly worker: number; readonly needed: number }
	/** Requests the position before an event. */
	| { readonly type: "position"; readonly worker: number; readonly event: number; readonly request: number };

export type FromThread =
	| {
			readonly type: "opened";
			readonly settings: Readonly<Record<string, string>>;
			readonly length: number;
	  }
	/** `item` null: the end of a pass. `bytes`: memory of the item. */
	| { readonly type: "event"; readonly worker: number; readonly item: unknown; readonly bytes: number }
	| { readonly type: "position"; readonly request: number; readonly position: unknown }
	| { readonly type: "skipped"; readonly skipped: SkippedSample }
	/** About a sample that is used nevertheless. */
	| { readonly type: "remark"; readonly sentence: string }
	| { readonly type: "failed"; readonly sentence: string; readonly isUserError: boolean; readonly stack: string };
