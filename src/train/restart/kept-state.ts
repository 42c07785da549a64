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

/** What the copy of a step says beside its tensors. */
interface StepRecord extends Pick<StartingPoint, "progress" | "optimizerSteps" | "schedules" | "lineage"> {
	/** State of this rank's data. */
	readonly data: unknown;
}

/** What holds for the whole job. */
interface JobRecord {
	/** Name of the training in its logs. */
	readonly training: string;
	/** Whether the job has begun to save checkpoints. */
	readonly saves: boolean;
}

/** The state that is kept. */
interface TrainedState {
	readonly checkpoints: Pick<Checkpoints, "tensors" | "schedules" | "lineage" | "provenance">;
	readonly optimizerSteps: () => number;
	readonly dataState: () => Promise<unknown>;
}

/** Words at the beginning of the file: for each slot its step (0: none) and the bytes of its record; the bytes of the job's record. */
const wordBytes = 4;
const wordOf = { step: (slot: number) => 2 * slot, record: (slot: number) => 2 * slot + 1, job: 4 };
const jobOffset = 64;
const slots = [0, 1] as const;
const firstSlot = 4096;
/** Room of a step's record: where nothing is written the file has a hole. */
const recordRoom = 2 ** 26;
const staging = new Uint8Array(2 ** 23);

export class KeptState implements Listener, Disposable {
	readonly #file: number;
	#state: TrainedState | null = null;
	/** This rank's tensors in the order of a slot. */
	#parts: readonly Tensor[] = [];
	/** Whether steps are copied: not after a copy that failed. */
	#copies: boolean;

	private constructor(
		path: string,
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
		return {
			...c,
			load: c.save,
			pretrainedCheckpoint: null,
			finetune: false,
			ckptStep: null,
			overrideCkptIteration: null,
			noLoadOptim: false,
			noLoadScheduler: false,
			noLoadRng: false,
		};
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
		const { data, ...record } = this.#read(this.#recordOffset(slot), bytes) as StepRecord;
		let position = this.#slotOffset(slot);
		for (const part of this.#parts) {
			position = this.#pieces(part, position, (piece, at, into) => {
				readSync(this.#file, into, 0, into.byteLength, at);
				piece.device.copyToDevice(piece, into);
			});
		}
		const states = exchangeTexts(world, JSON.stringify(data ?? null)).map((text) => JSON.parse(text) as unknown);
		return {
			...record,
			provenance: this.#state!.checkpoints.provenance,
			data: states.every((state) => state === null) ? null : states,
		};
	}

	/** Copies the state after a step. */
	async betweenSteps(progress: Progress): Promise<void> {
		const { iteration } = progress;
		if (this.#state === null || !this.#copies || iteration % this.interval! !== 0) return;
		const { schedules, lineage } = this.#state.checkpoints;
		const optimizerSteps = this.#state.optimizerSteps();
		const data = await this.#state.dataState();
		try {
			this.#copy({ progress, optimizerSteps, schedules, lineage, data });
		} catch (error) {
			this.#copies = false;
			this.warn(
				`The state of step ${iteration} cannot be kept in the host's memory (${systemReason(error)}): a restart goes on from the newest checkpoint.`,
			);
		}
	}

	/** A slot has no step while it is written, so that a process may end at any time. */
	#copy(record: StepRecord): void {
		const slot = this.#word(wordOf.step(0)) > this.#word(wordOf.step(1)) ? 1 : 0;
		this.#setWord(wordOf.step(slot), 0);
		let position = this.#slotOffset(slot);
		for (const part of this.#parts) {
			position = this.#pieces(part, position, (piece, at, from) => {
				piece.device.copyToHost(from, piece);
				this.#write(from, at);
			});
		}
		this.#setWord(wordOf.record(slot), this.#writeText(this.#recordOffset(slot), record));
		this.#setWord(wordOf.step(slot), record.progress.iteration);
	}

	/** Calls `move` for pieces of a tensor with their places in the file and as many bytes of the host. Returns the place after them. */
	#pieces(part: Tensor, position: number, move: (piece: Tensor, at: number, bytes: Uint8Array) => void): number {
		const size = dtypeBytes[part.dtype];
		const most = staging.byteLength / size;
		using flat = part.view([part.elements]);
		for (let from = 0; from < part.elements; from += most) {
			const elements = Math.min(most, part.elements - from);
			using piece = flat.columns(from, elements);
			move(piece, position + from * size, staging.subarray(0, elements * size));
		}
		return position + part.bytes;
	}

	#slotOffset(slot: number): number {
		const bytes = this.#parts.reduce((sum, part) => sum + part.bytes, 0);
		return firstSlot + slot * bytes;
	}

	#recordOffset(slot: number): number {
		return this.#slotOffset(slots.length) + slot * recordRoom;
	}

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

	#setWord(index: number, value: number): void {
		this.#write(new Uint8Array(Int32Array.of(value).buffer), index * wordBytes);
	}

	#read(position: number, length: number): unknown {
		const bytes = new Uint8Array(length);
		readSync(this.#file, bytes, 0, length, position);
		return JSON.parse(new TextDecoder().decode(bytes));
	}

	/** Returns the number of bytes. */
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
	return tensorsOf(shard).reduce((sum, part) => {
		using _ = part;
		return sum + part.bytes;
	}, 0);
}
