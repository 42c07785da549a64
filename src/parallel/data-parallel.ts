/**
 * Data parallelism over flat parameter buffers: gradients are summed over replicas in fp32, or rounded to bf16, and with ZeRO-1 each replica
 * keeps one equal slice of a buffer: it receives the sum of that slice only, updates it, and the updated values are
 * gathered again. Overlapped, a buffer's sum starts as soon as the last microbatch's backward has filled it and all
 * buffers before it, last layers first: every replica starts them in one order, whatever its samples hold.
 */
import type { Parameter } from "../tensor/parameter.ts";
import { cast, copyInto, type FloatDtype, Tensor } from "../tensor/tensor.ts";
import { type Group, groupOfOne, type Pending } from "./group.ts";
import type { ParameterBuffer, ParameterSet } from "./parameter-set.ts";

export interface ReplicaGroups {
	/** Ranks with the same part of dense parameters. */
	readonly dense: Group;
	/** Ranks with the same experts. */
	readonly expert: Group;
	/** Ranks that hold the replicated parameters and different tokens: their gradients are partial sums; or null. */
	readonly sequenceParallel: Group | null;
	/** This rank and the one of another pipeline stage that holds copies of its parameters; or null. */
	readonly copies: Group | null;
}

export interface OwnedRange {
	readonly begin: number;
	readonly end: number;
	/** Whether this rank's elements count in norms: of equal copies only one does. */
	readonly counted: boolean;
}

/** Most buffers whose sums are under way in a narrower type at once: each has a copy of its gradients. */
const mostRounded = 4;

export class DataParallel {
	/** Buffers in the order in which their sums start. */
	readonly #order: readonly ParameterBuffer[];
	readonly #bufferOf = new Map<string, ParameterBuffer>();
	/** Parameters of each buffer whose gradients are not final yet. */
	readonly #awaited = new Map<ParameterBuffer, Set<string>>();
	/** Sums that have started, those of the first buffers of #order. */
	readonly #pending: Pending[] = [];

	constructor(
		readonly parameters: ParameterSet,
		readonly groups: ReplicaGroups,
		/** ZeRO-1. */
		readonly distributedOptimizer: boolean,
		/** Whether this rank counts parameters that every tensor-parallel rank holds. */
		readonly countsReplicated: boolean,
		/** Whether gradientReady() is called and sums start during backward. */
		readonly overlaps = false,
		/** Type in which gradients travel and are summed over replicas. */
		readonly sumsIn: FloatDtype = "f32",
	) {
		this.#order = parameters.buffers
			.filter(({ gradients }) => gradients !== null)
			.toSorted(
				(a, b) => Number(this.#lastOfAll(a)) - Number(this.#lastOfAll(b)) || b.firstParameter - a.firstParameter,
			);
		for (const buffer of this.#order) {
			for (const { name } of buffer.entries) this.#bufferOf.set(name, buffer);
		}
		this.#expectAll();
	}

	/**
	 * Meets the other replicas, where sums start during backward. NCCL's members wait for each other when they meet, and for
	 * what their devices have under way: left to the first sum, some would do so amid their backward, others after it.
	 */
	connect(): void {
		if (!this.overlaps) return;
		for (const group of new Set(this.#order.map((buffer) => this.groupOf(buffer)))) {
			if (group.size === 1) continue;
			using nothing = Tensor.zeros(this.parameters.device, [1]);
			group.allReduce(nothing).wait();
		}
	}

	groupOf(buffer: ParameterBuffer): Group {
		return buffer.kind.expert ? this.groups.expert : this.groups.dense;
	}

	/** The elements of a buffer whose gradients are final here after reduce(), and which this rank updates. */
	owned(buffer: ParameterBuffer): OwnedRange {
		const { rank, size } = this.groupOf(buffer);
		const counted = (!buffer.kind.replicated || this.countsReplicated) && buffer.kind.copy !== "uncounted";
		if (!this.distributedOptimizer) return { begin: 0, end: buffer.elements, counted: counted && rank === 0 };
		const slice = buffer.elements / size;
		return { begin: rank * slice, end: (rank + 1) * slice, counted };
	}

	/** The step's last microbatch has added to this parameter's gradient. */
	gradientReady({ name }: Parameter): void {
		const buffer = this.#bufferOf.get(name);
		if (!this.overlaps || buffer === undefined) return;
		this.#awaited.get(buffer)!.delete(name);
		for (let next = this.#next; next && !this.#lastOfAll(next); next = this.#next) {
			if (this.#awaited.get(next)!.size > 0) return;
			this.#pending.push(this.#start(next));
		}
	}

	/**
	 * Starts the sums over replicas (and, where tokens are cut, over the ranks that cut them) that backward has not started.
	 * To be called before this rank waits for any other: replicas whose sums run already wait for it, and while theirs run
	 * they cannot meet a new group: making a communicator waits for what its device has under way.
	 */
	startSums(): void {
		for (let next = this.#next; next; next = this.#next) this.#pending.push(this.#start(next));
	}

	/** Starts the sums that are left and waits for all. */
	reduce(): void {
		this.startSums();
		for (const pending of this.#pending.splice(0)) pending.wait();
		this.#expectAll();
	}

	get #next(): ParameterBuffer | undefined {
		return this.#order[this.#pending.length];
	}

	/**
	 * Sums over ranks that cut tokens go over the group that backward itself uses, and another stage adds to its copy as
	 * long as its own backward runs: they stay behind it.
	 */
	#lastOfAll({ kind }: ParameterBuffer): boolean {
		return (kind.replicated && this.groups.sequenceParallel !== null) || kind.copy !== "none";
	}

	#expectAll(): void {
		for (const buffer of this.#order) this.#awaited.set(buffer, new Set(buffer.entries.map(({ name }) => name)));
	}

	#start(buffer: ParameterBuffer): Pending {
		const gradients = buffer.gradients!;
		if (buffer.kind.copy !== "none") this.groups.copies?.allReduce(gradients).wait();
		if (buffer.kind.replicated) this.groups.sequenceParallel?.allReduce(gradients).wait();
		const group = this.groupOf(buffer);
		if (group.size === 1) return { wait() {} };
		if (this.sumsIn !== "f32") return this.#startRounded(buffer, gradients);
		using slice = this.#slice(buffer, gradients);
		const scattered = group.reduceScatter(gradients, slice);
		if (this.distributedOptimizer) return scattered;
		// Not an all-reduce, which NCCL may add in another order than this: ZeRO-1 changes no bit.
		const gathered = group.allGather(slice, gradients);
		return {
			wait() {
				scattered.wait();
				gathered.wait();
			},
		};
	}

	/**
	 * Starts a sum in a narrower type, in memory of its own until the sum is back in the gradients. All replicas start sums in
	 * one order, so that a replica that waits for an early sum does not wait for later ones.
	 */
	#startRounded(buffer: ParameterBuffer, gradients: Tensor): Pending {
		const group = this.groupOf(buffer);
		this.#pending.at(-mostRounded)?.wait();
		const rounded = cast(gradients, this.sumsIn, "communication");
		using part = this.#slice(buffer, rounded);
		const scattered = group.reduceScatter(rounded, part);
		const gathered = this.distributedOptimizer ? null : group.allGather(part, rounded);
		return {
			wait: () => {
				if (rounded.disposed) return;
				scattered.wait();
				gathered?.wait();
				using from = gathered ? rounded.share() : this.#slice(buffer, rounded);
				using to = gathered ? gradients.share() : this.#slice(buffer, gradients);
				copyInto(from, to);
				rounded[Symbol.dispose]();
			},
		};
	}

	/** This rank's equal part of a buffer. The receiver disposes it. */
	#slice(buffer: ParameterBuffer, whole: Tensor): Tensor {
		const { rank, size } = this.groupOf(buffer);
		const elements = buffer.elements / size;
		return whole.columns(rank * elements, elements);
	}

	/**
	 * Gathers gradients for inspection: every replica then has all gradients, which with ZeRO-1 are otherwise final in
	 * its own slice only.
	 */
	gatherGradients(): void {
		if (!this.distributedOptimizer) return;
		for (const buffer of this.parameters.buffers) {
			const group = this.groupOf(buffer);
			if (!buffer.gradients || group.size === 1) continue;
			using slice = this.#slice(buffer, buffer.gradients);
			group.allGather(slice, buffer.gradients).wait();
		}
	}

	/** Gathers the values that each replica has updated: every replica has all values again. */
	gather(): void {
		if (!this.distributedOptimizer) return;
		for (const buffer of this.parameters.buffers) {
			const group = this.groupOf(buffer);
			if (buffer.frozen || group.size === 1) continue;
			using slice = this.#slice(buffer, buffer.values);
			group.allGather(slice, buffer.values).wait();
		}
	}
}

/** One process holds the only replica. */
export function singleReplica(parameters: ParameterSet): DataParallel {
	const alone = groupOfOne("dp", 0);
	const groups = { dense: alone, expert: alone, sequenceParallel: null, copies: null };
	return new DataParallel(parameters, groups, false, true);
}
