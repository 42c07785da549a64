/** The ranks of a run as one of them sees it: its rank, the world size, and the groups that it creates. */
import type { Restarts } from "../launch/place.ts";
import type { BackendName } from "../native/abi.ts";
import type { Device } from "../native/device.ts";
import type { Run } from "../native/run.ts";
import type { Tensor } from "../tensor/index.ts";
import { type Group, groupOfOne, type Pending } from "./group.ts";
import { RunGroup } from "./run-group.ts";

export class World implements Disposable {
	readonly #groups = new Map<string, { readonly group: RunGroup; readonly seen: Group }>();

	private constructor(
		readonly device: Device,
		readonly rank: number,
		readonly size: number,
		/** null: a single process. */
		private readonly run: Run | null,
		/** Transport of a run between GPUs. */
		private readonly backend: BackendName | null = null,
		private readonly imagine: ((name: string, ranks: readonly number[]) => Group) | null = null,
		/** null: a failure ends the run. */
		readonly restarts: Restarts | null = null,
	) {}

	/** Whether reductions add in rank order. NCCL's order depends on the element's place in the buffer. */
	get addsInRankOrder(): boolean {
		return this.backend !== "nccl" || this.device.library.kind === "cpu";
	}

	/** For planning: this process acts as `rank` of a world of `size` whose other ranks are simulated. */
	static simulated(
		device: Device,
		rank: number,
		size: number,
		imagine: (name: string, ranks: readonly number[]) => Group,
	): World {
		return new World(device, rank, size, null, null, imagine);
	}

	/** A world of this process alone. */
	static alone(device: Device): World {
		return new World(device, 0, 1, null);
	}

	/** Joins a run as `rank`. `backend`: transport between GPUs, equal on all ranks. */
	static join(
		device: Device,
		run: Run,
		rank: number,
		backend: BackendName = "nccl",
		restarts: Restarts | null = null,
	): World {
		run.join(rank);
		run.setBackend(device, backend);
		return new World(device, rank, run.ranks, run, backend, null, restarts);
	}

	/**
	 * Creates a group of the given global ranks, in this order. Collective over its members, which create all their groups in one
	 * order. The same name and ranks return the same group.
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

	/** Reports that a step is done, for the watchdog. */
	progress(step: number): void {
		this.run?.progress(step);
	}

	/** Reports that this rank has finished, so that its exit is not taken for a failure. */
	leave(): void {
		this.run?.leave();
	}

	/** Closes the groups. The run is closed by its creator. */
	[Symbol.dispose](): void {
		for (const { group } of this.#groups.values()) group[Symbol.dispose]();
		this.#groups.clear();
	}
}

// A Group whose collectives are reported to the device's tracer, if there is one, from start to completion.

export function tracedGroup(group: Group, device: Device): Group {
	const { name } = group;
	let sequence = 0;
	const seen = (kind: string, bytes: number, start: () => Pending): Pending => {
		const number = sequence++;
		if (device.tracer === null) return start();
		const began = performance.now();
		const pending = start();
		return {
			wait: () => {
				device.tracer?.beforeWait(device.stream);
				pending.wait();
				device.tracer?.collective({ group: name, kind, sequence: number, bytes, began });
			},
		};
	};
	/** Traces a synchronous call. */
	const whole = <Result>(kind: string, bytes: number, call: () => Result): Result => {
		let result: Result | undefined;
		seen(kind, bytes, () => {
			result = call();
			return { wait() {} };
		}).wait();
		return result!;
	};
	return {
		name,
		ranks: group.ranks,
		rank: group.rank,
		size: group.size,
		allReduce: (x, reduction) => seen("all_reduce", x.bytes, () => group.allReduce(x, reduction)),
		reduceScatter: (x, y) => seen("reduce_scatter", x.bytes, () => group.reduceScatter(x, y)),
		allGather: (x, y) => seen("all_gather", y.bytes, () => group.allGather(x, y)),
		broadcast: (x, root) => seen("broadcast", x.bytes, () => group.broadcast(x, root)),
		allToAll: (send, sendRows, receive, receiveRows) =>
			seen("all_to_all", send.bytes, () => group.allToAll(send, sendRows, receive, receiveRows)),
		exchangeRows: (send, receive, ranges, stage) =>
			seen("exchange_rows", send.rows.bytes + (send.beside?.bytes ?? 0), () =>
				group.exchangeRows(send, receive, ranges, stage),
			),
		rowTransport: () => group.rowTransport(),
		send: (x: Tensor, to) => seen("send", x.bytes, () => group.send(x, to)),
		receive: (x: Tensor, from) => seen("receive", x.bytes, () => group.receive(x, from)),
		barrier: () => whole("barrier", 0, () => group.barrier()),
		exchange: (values) => whole("exchange", values.byteLength, () => group.exchange(values)),
		contribute: (values) => whole("exchange", values.byteLength, () => group.contribute(values)),
	};
}
