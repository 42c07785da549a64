/**
 * The stream of a worker as numbered events (outputs and ends of passes). The positions before events are kept until the consumer
 * has passed them, so that a state can be saved at the consumer's event although the worker runs ahead.
 */
import type { Keyed } from "../sample.ts";
import type { WorkerStream } from "../worker-stream.ts";
import type { WorkerPosition } from "./state.ts";

/** An output, or null at the end of a pass. */
export type StreamEvent = Keyed | null;

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
