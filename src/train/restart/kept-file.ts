/**
 * A file in the host's memory that outlives the process of its rank (src/launch/rank-memory.ts), with room for the state of two
 * steps: of each the bytes of tensors, a slot, and a record as text.
 */
import { closeSync, ftruncateSync, openSync, readSync, writeSync } from "node:fs";
import { reserve } from "../../native/files.ts";

/**
 * Words at the beginning of the file: a slot's step (0: none) and its record's bytes; the job's record's (0: none); whether slots have
 * memory; the run's layout and the rank, each one more than it is.
 */
const wordBytes = 4;
const wordOf = {
	step: (slot: number) => 2 * slot,
	record: (slot: number) => 2 * slot + 1,
	job: 4,
	room: 5,
	pages: 6,
	layout: 7,
	rank: 8,
};
const jobOffset = 64;
export const slots = [0, 1] as const;
const firstSlot = 4096;
/** Slots have whole pages, so that no element lies in two windows. */
const pageBytes = 4096;
/** Room of a step's record: where nothing is written the file has a hole. */
const recordRoom = 2 ** 26;
/** Bytes of the file that are mapped at once: an array of JavaScript's ends at 4 GiB. */
export const windowBytes = 2 ** 30;

/** Bytes of a file, from an offset. */
export interface Range {
	readonly at: number;
	readonly bytes: number;
}

export class KeptFile implements Disposable {
	readonly #file: number;
	/** Parts of the file in this process's memory, by their number. */
	readonly #windows = new Map<number, Uint8Array>();
	/** Bytes of the job's record that is on its way to the file. */
	#coming = 0;

	/**
	 * `layout`: the run's; `rank`: the rank whose part of the host's memory the file is. Steps that were kept in another layout are void,
	 * and those of another rank, whose place the host had before.
	 */
	constructor(
		private readonly path: string,
		{ layout, rank }: { readonly layout: number; readonly rank: number },
	) {
		this.#file = openSync(path, "r+");
		if (this.#word(wordOf.layout) === layout + 1 && this.#word(wordOf.rank) === rank + 1) return;
		for (const slot of slots) this.empty(slot);
		this.#setWord(wordOf.job, 0);
		this.#setWord(wordOf.room, 0);
		this.#setWord(wordOf.layout, layout + 1);
		this.#setWord(wordOf.rank, rank + 1);
	}

	/** The step in a slot; 0: none. */
	step(slot: number): number {
		return this.#word(wordOf.step(slot));
	}

	/** The slot of a step, and that for the next one. */
	slotOf(step: number): number | null {
		return slots.find((slot) => this.step(slot) === step) ?? null;
	}
	get nextSlot(): number {
		return this.step(0) > this.step(1) ? 1 : 0;
	}

	/** A slot has no step while it is written, so that a process may end at any time. */
	empty(slot: number): void {
		this.#setWord(wordOf.step(slot), 0);
	}

	/** A slot is whole, and a job's record that came with it. */
	finish(slot: number, step: number): void {
		if (this.#coming > 0) this.#setWord(wordOf.job, this.#coming);
		this.#coming = 0;
		this.#setWord(wordOf.step(slot), step);
	}

	/** Pages of a slot; 0: not known. */
	get pages(): number {
		return this.#word(wordOf.pages);
	}

	/** Gives slots room for so many bytes of tensors. */
	size(bytes: number): void {
		this.pages = Math.ceil(bytes / pageBytes);
	}

	set pages(pages: number) {
		this.#setWord(wordOf.pages, pages);
	}

	offsetOf(slot: number): number {
		return firstSlot + slot * this.pages * pageBytes;
	}

	/** Allocates the slots once: where the host's memory is full that is an error, in a mapped file it would be the process's end. */
	makeRoom(): void {
		if (this.#word(wordOf.room) === 1) return;
		const end = this.offsetOf(slots.length);
		if (!reserve(this.#file, firstSlot, end - firstSlot)) this.#fill(end);
		this.#setWord(wordOf.room, 1);
	}

	#fill(end: number): void {
		const zeros = new Uint8Array(Math.min(end, 2 ** 23));
		for (let at = firstSlot; at < end; at += zeros.length) this.write(zeros.subarray(0, end - at), at);
	}

	/** A part of the slots in this process's memory. */
	mapped(window: number): Uint8Array {
		const known = this.#windows.get(window);
		if (known) return known;
		const offset = window * windowBytes;
		const size = Math.min(windowBytes, this.offsetOf(slots.length) - offset);
		this.#windows.set(window, Bun.mmap(this.path, { shared: true, offset, size }));
		return this.mapped(window);
	}

	record(slot: number): unknown {
		return this.#readJson(this.#recordRange(slot));
	}

	setRecord(slot: number, record: unknown): void {
		this.#setWord(wordOf.record(slot), this.#writeJson(this.#recordRange(slot).at, record));
	}

	/** The record of the whole job; null: none yet. */
	get job(): unknown {
		const range = this.#jobRange;
		return range.bytes === 0 ? null : this.#readJson(range);
	}

	set job(job: unknown) {
		// A process may end between the record and its length.
		this.#setWord(wordOf.job, 0);
		this.#setWord(wordOf.job, this.#writeJson(jobOffset, job));
	}

	/** Lengths of all that belongs to a slot, as take() wants them: pages, bytes of its record and of the job's. */
	lengths(slot: number): [pages: number, record: number, job: number] {
		return [this.pages, this.#word(wordOf.record(slot)), this.#word(wordOf.job)];
	}

	/** Takes the lengths of another file's slot. The job's record counts as absent until the slot is whole. */
	expect(slot: number, [pages, record, job]: readonly number[]): void {
		this.pages = pages!;
		this.#setWord(wordOf.record(slot), record!);
		this.#setWord(wordOf.job, 0);
		this.#coming = job!;
	}

	/** Gives all slots' memory back. */
	drop(): void {
		for (const slot of slots) this.empty(slot);
		this.#setWord(wordOf.room, 0);
		ftruncateSync(this.#file, firstSlot);
	}

	/** Where all that belongs to a slot lies. */
	rangesOf(slot: number): Range[] {
		const tensors = { at: this.offsetOf(slot), bytes: this.pages * pageBytes };
		return [tensors, this.#recordRange(slot), this.#jobRange];
	}

	read(bytes: Uint8Array, at: number): void {
		for (let done = 0; done < bytes.byteLength; ) {
			const read = readSync(this.#file, bytes, done, bytes.byteLength - done, at + done);
			if (read === 0) return;
			done += read;
		}
	}

	write(bytes: Uint8Array, at: number): void {
		for (let done = 0; done < bytes.byteLength; ) {
			done += writeSync(this.#file, bytes, done, bytes.byteLength - done, at + done);
		}
	}

	#recordRange(slot: number): Range {
		return { at: this.offsetOf(slots.length) + slot * recordRoom, bytes: this.#word(wordOf.record(slot)) };
	}

	get #jobRange(): Range {
		return { at: jobOffset, bytes: this.#coming > 0 ? this.#coming : this.#word(wordOf.job) };
	}

	#word(index: number): number {
		const bytes = new Int32Array(1);
		readSync(this.#file, bytes, 0, wordBytes, index * wordBytes);
		return bytes[0]!;
	}

	#setWord(index: number, value: number): void {
		this.write(new Uint8Array(Int32Array.of(value).buffer), index * wordBytes);
	}

	#readJson({ at, bytes: length }: Range): unknown {
		const bytes = new Uint8Array(length);
		this.read(bytes, at);
		return JSON.parse(new TextDecoder().decode(bytes));
	}

	#writeJson(at: number, value: unknown): number {
		const bytes = new TextEncoder().encode(JSON.stringify(value));
		this.write(bytes, at);
		return bytes.byteLength;
	}

	[Symbol.dispose](): void {
		closeSync(this.#file);
	}
}
