/**
 * What a rank keeps for a restart in its job, in a file that outlives its process (src/launch/rank-memory.ts): a copy of its
 * part of the training after a step, of the two latest such steps. docs/decisions/restarts.md says why that is enough.
 */
import { closeSync, openSync, readSync, writeSync } from "node:fs";
import { isCheckpoint, localFolder } from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { OptimizerShard } from "../../optim/adamw.ts";
import { exchangeTexts, type Group, type World } from "../../parallel/index.ts";
import { systemReason } from "../../system/system-errors.ts";
import { dtypeBytes, type Tensor } from "../../tensor/index.ts";
import type { Listener, Progress } from "../listeners.ts";
import type { Checkpoints } from "./checkpoints.ts";
import type { StartingPoint } from "./starting-point.ts";

/** What the copy of a step says beside its tensors; `data`: the state of this rank's. */
type StepRecord = Omit<StartingPoint, "provenance" | "data"> & { readonly data: unknown };

/** What holds for the whole job: the name of the training in its logs, and whether checkpoints are being saved. */
type JobRecord = { readonly training: string; readonly saves: boolean };

/** The state that is kept. */
interface TrainedState {
	readonly checkpoints: Pick<Checkpoints, "tensors" | "schedules" | "lineage" | "provenance">;
	readonly optimizerSteps: () => number;
	readonly dataState: () => Promise<unknown>;
}

/** Words at the beginning of the file: a slot's step (0: none) and its record's bytes; the job's record's; whether slots have memory. */
const wordBytes = 4;
const wordOf = { step: (slot: number) => 2 * slot, record: (slot: number) => 2 * slot + 1, job: 4, room: 5 };
const jobOffset = 64;
const slots = [0, 1] as const;
const firstSlot = 4096;
/** Slots begin at multiples of this, so that no element lies in two windows. */
const alignment = 64;
/** Room of a step's record: where nothing is written the file has a hole. */
const recordRoom = 2 ** 26;
/** Bytes of the file that are mapped at once: an array of JavaScript's ends at 4 GiB. */
const windowBytes = 2 ** 30;

export class KeptState implements Listener, Disposable {
	readonly #file: number;
	#state: TrainedState | null = null;
	/** This rank's tensors in the order of a slot. */
	#parts: readonly Tensor[] = [];
	/** Whether steps are copied: not after a copy that failed. */
	#copies: boolean;
	/** Parts of the file in this process's memory, by their number. */
	readonly #windows = new Map<number, Uint8Array>();
	private constructor(
		private readonly path: string,
		/** Number of restarts before this one. */
		readonly generation: number,
		private readonly interval: number | null,
		private readonly warn: (sentence: string) => void,
	) {
		this.#file = openSync(path, "r+");
		this.#copies = interval !== null;
	}

	/** null: a failure ends the run. */
	static open(c: TrainingConfiguration, { restarts }: World, warn: (sentence: string) => void): KeptState | null {
		return restarts && new KeptState(restarts.memory, restarts.generation, c.nonPersistentSaveInterval, warn);
	}

	/**
	 * The configuration with which the job's training goes on: from its newest checkpoint, once it has begun to save. Collective
	 * over the world.
	 */
	configuration(c: TrainingConfiguration, world: Group): TrainingConfiguration {
		if (this.generation === 0 || c.save === null) return c;
		const saved = this.#job?.saves === true && isCheckpoint(localFolder(c.save, c.stagingDir));
		if (!world.exchange(Int32Array.of(saved ? 1 : 0)).some(([one]) => one === 1)) return c;
		const start = {
			load: c.save,
			pretrainedCheckpoint: null,
			finetune: false,
			ckptStep: null,
			overrideCkptIteration: null,
		};
		return { ...c, ...start, noLoadOptim: false, noLoadScheduler: false, noLoadRng: false };
	}

	/** Name of the training in its logs: that of the job's first start, which is `own` now. */
	training(own: string): string {
		if (this.#job === null) this.#job = { training: own, saves: false };
		return this.#job!.training;
	}

	/** To be called before the job's first save begins. */
	saves(): void {
		if (this.#job?.saves === false) this.#job = { ...this.#job, saves: true };
	}

	/** Takes the state to copy from, and to copy to. */
	hold(state: TrainedState): void {
		this.#state = state;
		const { buffers, loose } = state.checkpoints.tensors;
		this.#parts = [
			...buffers.flatMap(({ shard }) => (shard === null ? [] : tensorsOf(shard))),
			...loose.map(({ value }) => value.share()),
		];
	}

	/**
	 * Restores the newest step that every rank has a copy of, where it is newer than `stored`, to which the state was restored
	 * already. Values of other ranks' slices are still to be gathered. Collective over the world.
	 */
	restore(stored: StartingPoint | null, world: Group): StartingPoint | null {
		if (this.generation === 0 || !this.#copies) return stored;
		const own = slots.map((slot) => this.#word(wordOf.step(slot)));
		const all = world.exchange(Int32Array.from(own));
		const common = Math.max(0, ...own.filter((step) => all.every((steps) => steps.includes(step))));
		const step = Math.max(common, stored?.progress.iteration ?? 0);
		// Steps that are done again take the slots of their first copies.
		for (const slot of slots) if (own[slot]! > step) this.#setWord(wordOf.step(slot), 0);
		return step > (stored?.progress.iteration ?? 0) ? this.#copyBack(step, world) : stored;
	}

	#copyBack(step: number, world: Group): StartingPoint {
		const slot = slots.find((one) => this.#word(wordOf.step(one)) === step)!;
		const bytes = this.#word(wordOf.record(slot));
		const { data: own, ...record } = this.#read(this.#recordOffset(slot), bytes) as StepRecord;
		let position = this.#slotOffset(slot);
		for (const part of this.#parts) {
			position = this.#pieces(part, position, (piece, kept) => piece.device.copyToDevice(piece, kept));
		}
		const states = exchangeTexts(world, JSON.stringify(own ?? null)).map((text) => JSON.parse(text) as unknown);
		const data = states.every((state) => state === null) ? null : states;
		return { ...record, provenance: this.#state!.checkpoints.provenance, data };
	}

	/** Copies the state after a step. */
	async betweenSteps(progress: Progress): Promise<void> {
		const { iteration } = progress;
		if (this.#state === null || !this.#copies || iteration % this.interval! !== 0) return;
		const { schedules, lineage } = this.#state.checkpoints;
		const data = await this.#state.dataState();
		try {
			this.#copy({ progress, optimizerSteps: this.#state.optimizerSteps(), schedules, lineage, data });
		} catch (error) {
			this.#copies = false;
			this.warn(
				`The state of step ${iteration} cannot be kept in the host's memory (${systemReason(error)}): a restart goes on from the newest checkpoint.`,
			);
		}
	}

	/** A slot has no step while it is written, so that a process may end at any time. */
	#copy(record: StepRecord): void {
		this.#makeRoom();
		const slot = this.#word(wordOf.step(0)) > this.#word(wordOf.step(1)) ? 1 : 0;
		this.#setWord(wordOf.step(slot), 0);
		let position = this.#slotOffset(slot);
		for (const part of this.#parts) {
			position = this.#pieces(part, position, (piece, kept) => piece.device.copyToHost(kept, piece));
		}
		this.#setWord(wordOf.record(slot), this.#writeText(this.#recordOffset(slot), record));
		this.#setWord(wordOf.step(slot), record.progress.iteration);
	}

	/** Writes to the slots once: where the host's memory is full that is an error, in a mapped file it would be the process's end. */
	#makeRoom(): void {
		if (this.#word(wordOf.room) === 1) return;
		const end = this.#slotOffset(slots.length);
		const zeros = new Uint8Array(Math.min(end, 2 ** 23));
		for (let at = firstSlot; at < end; at += zeros.length) this.#write(zeros.subarray(0, end - at), at);
		this.#setWord(wordOf.room, 1);
	}

	/** Calls `move` for pieces of a tensor and as many bytes of the file. Returns the place behind them. */
	#pieces(part: Tensor, position: number, move: (piece: Tensor, kept: Uint8Array) => void): number {
		const size = dtypeBytes[part.dtype];
		using flat = part.view([part.elements]);
		for (let from = 0; from < part.elements; ) {
			const at = position + from * size;
			const window = Math.floor(at / windowBytes);
			const begin = window * windowBytes;
			const elements = Math.min(part.elements - from, (begin + windowBytes - at) / size);
			using piece = flat.columns(from, elements);
			move(piece, this.#mapped(window).subarray(at - begin, at - begin + elements * size));
			from += elements;
		}
		return position + part.bytes;
	}

	#mapped(window: number): Uint8Array {
		const known = this.#windows.get(window);
		if (known) return known;
		const offset = window * windowBytes;
		const size = Math.min(windowBytes, this.#slotOffset(slots.length) - offset);
		this.#windows.set(window, Bun.mmap(this.path, { shared: true, offset, size }));
		return this.#mapped(window);
	}

	#slotOffset(slot: number): number {
		const bytes = this.#parts.reduce((sum, part) => sum + part.bytes, 0);
		return firstSlot + slot * Math.ceil(bytes / alignment) * alignment;
	}

	readonly #recordOffset = (slot: number) => this.#slotOffset(slots.length) + slot * recordRoom;

	get #job(): JobRecord | null {
		const bytes = this.#word(wordOf.job);
		return bytes === 0 ? null : (this.#read(jobOffset, bytes) as JobRecord);
	}

	set #job(job: JobRecord) {
		this.#setWord(wordOf.job, this.#writeText(jobOffset, job));
	}

	#word(index: number): number {
		const bytes = new Int32Array(1);
		readSync(this.#file, bytes, 0, wordBytes, index * wordBytes);
		return bytes[0]!;
	}

	readonly #setWord = (index: number, value: number) =>
		this.#write(new Uint8Array(Int32Array.of(value).buffer), index * wordBytes);

	#read(position: number, length: number): unknown {
		const bytes = new Uint8Array(length);
		readSync(this.#file, bytes, 0, length, position);
		return JSON.parse(new TextDecoder().decode(bytes));
	}

	#writeText(position: number, value: StepRecord | JobRecord): number {
		const bytes = new TextEncoder().encode(JSON.stringify(value));
		this.#write(bytes, position);
		return bytes.byteLength;
	}

	#write(bytes: Uint8Array, position: number): void {
		for (let done = 0; done < bytes.byteLength; ) {
			done += writeSync(this.#file, bytes, done, bytes.byteLength - done, position + done);
		}
	}

	[Symbol.dispose](): void {
		for (const part of this.#parts) part[Symbol.dispose]();
		closeSync(this.#file);
	}
}

/** What is kept of a shard; the receiver disposes them. */
function tensorsOf({ buffer, master, expAvg, expAvgSq, begin, end }: OptimizerShard): Tensor[] {
	// Values in fp32 are their own masters.
	const values = buffer.dtype === "f32" ? [] : [buffer.values.columns(begin, end - begin)];
	return [master, expAvg, expAvgSq].map((one) => one.share()).concat(values);
}

/** Bytes that a copy of a shard takes. */
export function keptBytes(shard: OptimizerShard): number {
	const parts = tensorsOf(shard);
	for (const part of parts) part[Symbol.dispose]();
	return parts.reduce((sum, { bytes }) => sum + bytes, 0);
}
