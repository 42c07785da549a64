/**
 * Saves a training while it goes on: a snapshot to host memory, then a thread of every rank writes its share, and when
 * all have written rank 0's thread publishes. Ranks agree on how far they are by looking together, once a step.
 */
import { mkdirSync } from "node:fs";
import { hostname } from "node:os";
import { basename, join } from "node:path";
import { exchangeTexts, type Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { type Retention, SaveThread } from "../native/save-thread.ts";
import { type CheckpointDescription, iterationName, NativeSave } from "../native/writer.ts";
import { lockLost, newRunName, type WriterLock } from "../native/writer-lock.ts";
import type { CheckpointStore } from "../remote/checkpoint-store.ts";
import { roomProblem } from "../save-folder.ts";
import { SnapshotMemory, takeSnapshot } from "./snapshot.ts";
import type { TrainingTensors } from "./tensors.ts";

export interface SaverOptions {
	readonly store: CheckpointStore;
	/** Every rank of the run. */
	readonly world: Group;
	readonly tensors: TrainingTensors;
	readonly withOptimizer: boolean;
	/** Elements that are copied at once; default 2^28. */
	readonly copiedElements?: number;
	readonly retention: Omit<Retention, "own">;
	/** Folders' names of the checkpoints that may be replaced and deleted besides those it writes; null: any. */
	readonly own: readonly string[] | null;
	/** Name of the run; default: a new one. */
	readonly run?: string;
	/** The right to write, on rank 0; null: the folder has no lock. */
	readonly lock: WriterLock | null;
	/** Whether a save that fails is only said, and training goes on. */
	readonly goesOnAfterFailure: boolean;
	/** Hear of saves, and of those that fail; called on every rank. */
	readonly note: (sentence: string) => void;
	readonly warn: (sentence: string) => void;
}

/** Ranks that wait for a save look together this often, in milliseconds: a run without progress counts as stuck. */
const longestWait = 5000;

/** This rank's progress in a phase of the save. */
const Progress = { working: 0, done: 1, failed: 2 } as const;

interface Saving {
	readonly iteration: number;
	readonly folder: string;
	readonly description: Omit<CheckpointDescription, "iteration">;
	readonly started: number;
	phase: "write" | "publish";
	progress: number;
	/** This rank's error; null: none. */
	failure: string | null;
}

export class CheckpointSaver implements Disposable {
	readonly #memory: SnapshotMemory;
	readonly #thread = new SaveThread();
	#saving: Saving | null = null;
	#failed = false;
	/** Names of the checkpoints that this run has written. */
	readonly #written: string[] = [];
	/** Seconds that training stood still for the latest save. */
	#stall = 0;

	constructor(private readonly options: SaverOptions) {
		this.#memory = new SnapshotMemory(options.copiedElements);
	}

	/** Whether a save is under way: the same on every rank. */
	get busy(): boolean {
		return this.#saving !== null;
	}

	/** Whether the latest save has failed and training went on. */
	get failed(): boolean {
		return this.#failed;
	}

	/**
	 * Compares the size of a checkpoint with the free space in its folder, which exists. Too little space ends the run
	 * with a sentence of rank 0, or is a warning where a save may fail. Every rank calls this together.
	 */
	requireRoom(): void {
		const { store, world, tensors, withOptimizer, goesOnAfterFailure, warn } = this.options;
		const { path, folder, staged } = store;
		// The disk of a host holds what is on its way to an object store from its ranks.
		const host = staged ? hostname() : "";
		const all = exchangeTexts(world, `${tensors.writtenBytes(withOptimizer)} ${host}`).map((text) => text.split(" "));
		const bytes = all.reduce((sum, [own, where]) => sum + (where === host ? Number(own) : 0), 0);
		const looks = staged || world.rank === 0;
		const own = looks
			? roomProblem(`--save ${path}: a checkpoint${staged ? ` on its way, in ${folder},` : ""}`, folder, bytes)
			: null;
		const problems = exchangeTexts(world, own ?? "");
		const problem = problems.find((text) => text !== "");
		if (problem === undefined) return;
		if (goesOnAfterFailure) warn(problem);
		else if (world.rank === problems.indexOf(problem)) throw new UserError(problem);
		// Ends when that rank does.
		else world.barrier();
	}

	/** Begins a save of the state as it is; one under way is finished first. Every rank calls this together. */
	start(iteration: number, description: Omit<CheckpointDescription, "iteration">): void {
		const started = performance.now();
		if (this.#saving) this.finish();
		const { store, world, tensors, withOptimizer } = this.options;
		this.#failed = false;
		const [begun] = exchangeTexts(world, world.rank === 0 ? this.#begin(iteration) : "") as [string];
		const { folder, failure } = JSON.parse(begun) as { folder: string | null; failure: string | null };
		if (folder === null) {
			this.#conclude(iteration, world.rank === 0 ? failure : null, failure!);
			return;
		}
		const entries = takeSnapshot(tensors, this.#memory, withOptimizer);
		const own = join(store.folder, basename(folder));
		this.#thread.start({ ...this.#job(), kind: "write", folder: own, iteration, rank: world.rank, entries });
		this.#saving = {
			iteration,
			folder: own,
			description,
			started,
			phase: "write",
			progress: Progress.working,
			failure: null,
		};
		this.#stall = (performance.now() - started) / 1000;
	}

	/** Looks how far the save under way is. Every rank calls this together, where `busy`. */
	poll(): void {
		const saving = this.#saving;
		if (saving === null) return;
		this.#look(saving, false);
		this.#advance(saving);
	}

	/** Waits for the save under way. Every rank calls this together. */
	finish(): void {
		while (this.#saving) {
			this.#look(this.#saving, true);
			this.#advance(this.#saving);
		}
	}

	#job(): { readonly store: { readonly path: string; readonly folder: string; readonly staged: boolean } } {
		const { path, folder, staged } = this.options.store;
		return { store: { path, folder, staged } };
	}

	/** Rank 0's answer to all ranks: the folder to write to, or the reason why there is none. */
	#begin(iteration: number): string {
		const { store, run, lock = null } = this.options;
		try {
			mkdirSync(store.folder, { recursive: true });
			lock?.require();
			// Objects in a store are named after the folder, anew in every save.
			const name = store.staged ? newRunName() : run;
			return JSON.stringify({ folder: NativeSave.begin(store.folder, iteration, name).folder, failure: null });
		} catch (error) {
			return JSON.stringify({ folder: null, failure: (error as Error).message });
		}
	}

	/** This rank's progress. */
	#look(saving: Saving, wait: boolean): void {
		if (saving.progress !== Progress.working) return;
		const result = wait ? this.#thread.wait(longestWait) : this.#thread.poll();
		if (result === null) return;
		saving.failure = result.failure;
		saving.progress = result.failure === null ? Progress.done : Progress.failed;
	}

	/** Takes the progress of all ranks, and acts on it. */
	#advance(saving: Saving): void {
		const { world } = this.options;
		const progress = world.exchange(Int32Array.of(saving.progress)).map(([value]) => value!);
		if (progress.includes(Progress.working)) return;
		if (progress.includes(Progress.failed)) {
			const { lock = null } = this.options;
			// A run that takes the folder over removes this run's unfinished save.
			const lost = lock === null ? null : lockLost(lock.reference);
			if (lost !== null) saving.failure = lost;
			const failures = exchangeTexts(world, saving.failure ?? "");
			if (world.rank === 0) new NativeSave(this.options.store.folder, saving.iteration, saving.folder).abort();
			this.#saving = null;
			this.#conclude(saving.iteration, saving.failure, failures.find((text) => text !== "")!);
			return;
		}
		if (saving.phase === "write") {
			saving.phase = "publish";
			if (world.rank !== 0) return;
			saving.progress = Progress.working;
			const { lock = null, own = null } = this.options;
			const retention = { ...this.options.retention, own: own === null ? null : [...own, ...this.#written] };
			this.#written.push(iterationName(saving.iteration));
			const { folder, iteration, description } = saving;
			const job = { folder, iteration, ranks: world.size, description, retention };
			this.#thread.start({ ...this.#job(), kind: "publish", ...job, lock: lock?.reference ?? null });
			return;
		}
		this.#saving = null;
		const seconds = (performance.now() - saving.started) / 1000;
		this.options.note(
			`Saved the checkpoint of step ${saving.iteration} to ${this.options.store.path}/${iterationName(saving.iteration)} (${seconds.toFixed(2)} s, training waited ${this.#stall.toFixed(3)} s).`,
		);
	}

	/** Says that a save has failed, or ends the run with the sentence of a rank whose part it was. */
	#conclude(iteration: number, own: string | null, sentence: string): void {
		const { goesOnAfterFailure, warn, world } = this.options;
		this.#failed = true;
		if (goesOnAfterFailure) {
			warn(`The checkpoint of step ${iteration} was not saved, training goes on: ${sentence}`);
			return;
		}
		if (own !== null) throw new UserError(`The checkpoint of step ${iteration} was not saved: ${own}`);
		// Ends when the rank whose part it was does.
		world.barrier();
	}

	[Symbol.dispose](): void {
		this.#thread[Symbol.dispose]();
	}
}
