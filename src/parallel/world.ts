/** All ranks of a run from the view of one of them: its number, and the groups it belongs to. */
import type { BackendName } from "../native/abi.ts";
import type { Device } from "../native/device.ts";
import type { Run } from "../native/run.ts";
import { type Group, groupOfOne } from "./group.ts";
import { RunGroup } from "./run-group.ts";
import { tracedGroup } from "./traced-group.ts";

export class World implements Disposable {
	readonly #groups = new Map<string, { readonly group: RunGroup; readonly seen: Group }>();

	private constructor(
		readonly device: Device,
		readonly rank: number,
		readonly size: number,
		/** null: a world of one process. */
		private readonly run: Run | null,
		/** Whether sums over ranks are made in the order of the ranks; NCCL's order depends on the place in the buffer. */
		readonly addsInRankOrder: boolean,
		private readonly imagine: ((name: string, ranks: readonly number[]) => Group) | null = null,
	) {}

	/** This process plays `rank` of a world of `size` whose other ranks are simulated: for planning. */
	static simulated(
		device: Device,
		rank: number,
		size: number,
		imagine: (name: string, ranks: readonly number[]) => Group,
	): World {
		return new World(device, rank, size, null, true, imagine);
	}

	/** One process is the whole world. */
	static alone(device: Device): World {
		return new World(device, 0, 1, null, true);
	}

	/** This process becomes `rank` of a run. `backend`: how GPUs talk, the same at all ranks. */
	static join(device: Device, run: Run, rank: number, backend: BackendName = "nccl"): World {
		run.join(rank);
		run.setBackend(device, backend);
		return new World(device, rank, run.ranks, run, device.library.kind === "cpu" || backend === "shm");
	}

	/**
	 * A group of the given global ranks, in this order. Its members call this, all their groups in the same order. Asked
	 * for again, a name and set of ranks give the same group.
	 */
	async group(name: string, ranks: readonly number[]): Promise<Group> {
		if (!ranks.includes(this.rank)) throw new RangeError(`Rank ${this.rank} is no member of ${name} [${ranks}].`);
		if (ranks.length === 1) return groupOfOne(name, this.rank);
		if (this.imagine !== null) return this.imagine(name, ranks);
		if (this.run === null) return groupOfOne(name, this.rank);
		const key = `${name} ${ranks}`;
		const known = this.#groups.get(key);
		if (known) return known.seen;
		const group = new RunGroup(this.run, this.device, this.rank, name, ranks);
		const seen = tracedGroup(group, this.device);
		this.#groups.set(key, { group, seen });
		return seen;
	}

	/** A step is done. */
	progress(step: number): void {
		this.run?.progress(step);
	}

	/** Says that this rank has done all its work, so that its end does not count as a failure. */
	leave(): void {
		this.run?.leave();
	}

	/** Closes the groups; the run itself is closed by its maker. */
	[Symbol.dispose](): void {
		for (const { group } of this.#groups.values()) group[Symbol.dispose]();
		this.#groups.clear();
	}
}
