/**
 * The state that a rank keeps for a restart in its job, in a file that outlives its process (src/launch/rank-memory.ts): a copy of its
 * part of the training after a step, of the two latest such steps. docs/decisions/restarts.md says why that is enough.
 */
import { isCheckpoint, localFolder } from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { placeFromEnvironment, type Restarts } from "../../launch/place.ts";
import type { OptimizerShard } from "../../optim/optimizer.ts";
import { exchangeTexts, type Group, type World } from "../../parallel/index.ts";
import { WrongResult } from "../../system/errors.ts";
import { systemReason } from "../../system/system-errors.ts";
import { dtypeBytes, type Tensor } from "../../tensor/index.ts";
import type { Listener, Progress } from "../listeners.ts";
import type { StateCheck, StateWords } from "../wrong-results.ts";
import type { Checkpoints } from "./checkpoints.ts";
import { KeptFile, slots, windowBytes } from "./kept-file.ts";
import { Replicas } from "./replicas.ts";
import type { StartingPoint } from "./starting-point.ts";

/** The record of a copied step beside its tensors; `data`: the state of this rank's; `words`: checksums of its state, if known. */
type StepRecord = Omit<StartingPoint, "provenance" | "data"> & {
	readonly data: unknown;
	readonly words: StateWords | null;
};

/** The record of the whole job: the name of the training in its logs, and whether checkpoints are being saved. */
type JobRecord = { readonly training: string; readonly saves: boolean };

/** The state that is kept. */
interface TrainedState {
	readonly checkpoints: Pick<Checkpoints, "tensors" | "schedules" | "lineage" | "provenance">;
	readonly optimizerSteps: () => number;
	readonly dataState: () => Promise<unknown>;
	/** null: parameters are not compared. */
	readonly check: StateCheck | null;
}

export class KeptState implements Listener, Disposable {
	readonly #file: KeptFile;
	/** Copies of other ranks' state, and theirs of this one's; null: there are none. */
	#replicas: Replicas | null = null;
	#state: TrainedState | null = null;
	/** This rank's tensors in the order of a slot. */
	#parts: readonly Tensor[] = [];
	/** Whether steps are copied: not after a copy that failed. */
	#copies: boolean;

	/** Number of restarts before this one. */
	readonly generation: number;

	private constructor(
		rank: number,
		{ memory, generation, layout }: Restarts,
		private readonly interval: number | null,
		private readonly warn: (sentence: string) => void,
	) {
		this.generation = generation;
		this.#file = new KeptFile(memory, { layout, rank });
		this.#copies = interval !== null;
	}

	/** null: a failure ends the run. */
	static open(c: TrainingConfiguration, { restarts, rank }: World, warn: (sentence: string) => void): KeptState | null {
		return restarts && new KeptState(rank, restarts, c.nonPersistentSaveInterval, warn);
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

	/** Takes the state to copy from, and to copy to. Collective over the world. */
	async hold(state: TrainedState, world: World, c: TrainingConfiguration): Promise<void> {
		this.#state = state;
		const { buffers, loose } = state.checkpoints.tensors;
		this.#parts = [
			...buffers.flatMap(({ shard }) => (shard === null ? [] : tensorsOf(shard))),
			...loose.map(({ value }) => value.share()),
		];
		this.#file.size(this.#parts.reduce((sum, { bytes }) => sum + bytes, 0));
		if (!c.replication || !this.#copies) return;
		const jump = c.replicationJump ?? placeFromEnvironment()!.localSize;
		this.#replicas = await Replicas.open(this.#file, world, jump, this.warn);
		if (this.#replicas === null && world.rank === 0)
			this.warn("replication: all ranks are on one host, which keeps no second copy.");
	}

	/**
	 * Restores the newest step that every rank has a copy of, where it is newer than `stored`, to which the state was restored
	 * already. Values of other ranks' slices are still to be gathered. Collective over the world.
	 */
	restore(stored: StartingPoint | null, world: Group): StartingPoint | null {
		if (this.generation === 0 || !this.#copies) return stored;
		const replicas = this.#replicas;
		const own = Int32Array.from(slots, (slot) => this.#file.step(slot));
		const all = world.exchange(replicas?.knownSteps() ?? own);
		const stepsOf = (rank: number) => replicas?.stepsOf(all, rank) ?? [...all[rank]!];
		const common = Math.max(0, ...stepsOf(0).filter((step) => all.every((_, rank) => stepsOf(rank).includes(step))));
		const step = Math.max(common, stored?.progress.iteration ?? 0);
		// Steps that are done again take the slots of their first copies.
		for (const slot of slots) if (own[slot]! > step) this.#file.empty(slot);
		replicas?.forgetAfter(step);
		if (step <= (stored?.progress.iteration ?? 0)) return stored;
		// The host of a rank that was brought back has no copy of another's yet.
		if (replicas?.bringBack(step)) replicas.spread(this.#file.slotOf(step));
		return this.#copyBack(step, world);
	}

	#copyBack(step: number, world: Group): StartingPoint {
		const slot = this.#file.slotOf(step)!;
		const { data: own, words: _, ...record } = this.#file.record(slot) as StepRecord;
		let position = this.#file.offsetOf(slot);
		for (const part of this.#parts) {
			position = this.#pieces(part, position, (piece, kept) => piece.device.copyToDevice(piece, kept));
		}
		const states = exchangeTexts(world, JSON.stringify(own ?? null)).map((text) => JSON.parse(text) as unknown);
		const data = states.every((state) => state === null) ? null : states;
		return { ...record, provenance: this.#state!.checkpoints.provenance, data };
	}

	/** Compares the restored state, once it is whole, with what it was when it was copied. Throws a WrongResult, and forgets the copy. */
	confirm(step: number, rank: number): void {
		const { words } = this.#file.record(this.#file.slotOf(step)!) as StepRecord;
		if (words === null || this.#state?.check?.resume(words) !== false) return;
		for (const slot of slots) if (this.#file.step(slot) === step) this.#file.empty(slot);
		this.#replicas?.forgetAfter(step - 1);
		throw new WrongResult(
			rank,
			`What rank ${rank} has kept of step ${step} is not what it was: its memory is at fault.`,
		);
	}

	/** Copies the state after a step. */
	async betweenSteps(progress: Progress): Promise<void> {
		const { iteration } = progress;
		if (this.#state === null || this.interval === null || iteration % this.interval !== 0) return;
		if (!this.#copies) {
			this.#replicas?.spread(null);
			return;
		}
		const { schedules, lineage } = this.#state.checkpoints;
		const data = await this.#state.dataState();
		let slot: number | null = null;
		try {
			const words = this.#state.check?.known ?? null;
			slot = this.#copy({ progress, optimizerSteps: this.#state.optimizerSteps(), schedules, lineage, data, words });
		} catch (error) {
			this.#copies = false;
			this.warn(
				`The state of step ${iteration} cannot be kept in the host's memory (${systemReason(error)}): a restart goes on from the newest checkpoint.`,
			);
		}
		this.#replicas?.spread(slot);
	}

	/** Returns the slot. */
	#copy(record: StepRecord): number {
		this.#file.makeRoom();
		const slot = this.#file.nextSlot;
		this.#file.empty(slot);
		let position = this.#file.offsetOf(slot);
		for (const part of this.#parts) {
			position = this.#pieces(part, position, (piece, kept) => piece.device.copyToHost(kept, piece));
		}
		this.#file.setRecord(slot, record);
		this.#file.finish(slot, record.progress.iteration);
		return slot;
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
			move(piece, this.#file.mapped(window).subarray(at - begin, at - begin + elements * size));
			from += elements;
		}
		return position + part.bytes;
	}

	get #job(): JobRecord | null {
		return this.#file.job as JobRecord | null;
	}

	set #job(job: JobRecord) {
		this.#file.job = job;
	}

	[Symbol.dispose](): void {
		for (const part of this.#parts) part[Symbol.dispose]();
		this.#replicas?.[Symbol.dispose]();
		this.#file[Symbol.dispose]();
	}
}

/** The kept tensors of a shard; the receiver disposes them. */
function tensorsOf({ buffer, master, states, begin, end }: OptimizerShard): Tensor[] {
	// Values in fp32 are their own masters.
	const values = buffer.dtype === "f32" ? [] : [buffer.values.columns(begin, end - begin)];
	return [master, ...states.values()].map((one) => one.share()).concat(values);
}

/** Bytes that a copy of a shard takes. */
export function keptBytes(shard: OptimizerShard): number {
	const parts = tensorsOf(shard);
	for (const part of parts) part[Symbol.dispose]();
	return parts.reduce((sum, { bytes }) => sum + bytes, 0);
}
