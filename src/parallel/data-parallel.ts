/**
 * Data parallelism over flat parameter buffers. Gradients are reduced over replicas in fp32 or bf16. With ZeRO-1 each replica
 * owns an equal slice of each buffer: it receives the reduced gradients of its slice, updates it, and the updated values are
 * all-gathered. With overlap a buffer's reduction starts when the last microbatch's backward has completed it and all buffers
 * before it, last layers first, so that all replicas start reductions in one order whatever their samples hold.
 */
import { cast, copyInto, type FloatDtype, type Parameter, Tensor } from "../tensor/index.ts";
import { type Group, groupOfOne, type Pending } from "./group.ts";
import type { ParameterBuffer, ParameterSet } from "./parameter-set.ts";

export interface ReplicaGroups {
	/** Ranks with the same shard of the dense parameters. */
	readonly dense: Group;
	/** Ranks with the same shard of the same experts. */
	readonly expert: Group;
	/**
	 * Tensor-parallel ranks with different tokens (sequence parallelism), whose gradients of replicated parameters are partial
	 * sums; null: none.
	 */
	readonly sequenceParallel: Group | null;
	/** This rank and the rank of another pipeline stage that holds copies of its parameters; null: no copies. */
	readonly copies: Group | null;
	/** Ranks that together hold the same dense matrices, and the same experts', tensor-parallel ranks in turn; absent: the replicas. */
	readonly matrices?: { readonly dense: Group; readonly expert: Group };
}

export interface OwnedRange {
	readonly begin: number;
	readonly end: number;
	/** Whether this rank's elements count in norms; exactly one of equal copies does. */
	readonly counted: boolean;
}

/** Largest number of bf16 reductions in flight, each of which needs a copy of its gradients. */
const mostRounded = 4;

export interface DataParallelOptions {
	/** Whether ZeRO-1 is on; default: no. */
	readonly distributedOptimizer?: boolean | undefined;
	/** Whether this rank counts, in norms, the parameters that are replicated over tensor-parallel ranks; default: yes. */
	readonly countsReplicated?: boolean;
	/** Whether reductions start during backward, driven by gradientReady(); default: no. */
	readonly overlaps?: boolean;
	/** Dtype in which gradients are sent and reduced; default: f32. */
	readonly sumsIn?: FloatDtype | undefined;
}

export class DataParallel {
	/** Buffers in the order in which their reductions start. */
	readonly #order: readonly ParameterBuffer[];
	readonly #bufferOf = new Map<string, ParameterBuffer>();
	/** Names of each buffer's parameters whose gradients are not complete yet. */
	readonly #awaited = new Map<ParameterBuffer, Set<string>>();
	/** Reductions in flight or finished: those of the first buffers of #order. */
	readonly #pending: Pending[] = [];

	readonly distributedOptimizer: boolean;
	readonly countsReplicated: boolean;
	readonly overlaps: boolean;
	readonly sumsIn: FloatDtype;

	constructor(
		readonly parameters: ParameterSet,
		readonly groups: ReplicaGroups,
		options: DataParallelOptions = {},
	) {
		this.distributedOptimizer = options.distributedOptimizer ?? false;
		this.countsReplicated = options.countsReplicated ?? true;
		this.overlaps = options.overlaps ?? false;
		this.sumsIn = options.sumsIn ?? "f32";
		for (const buffer of parameters.buffers) this.#refuseUnevenSlices(buffer);
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
	 * Creates the communicators, if reductions start during backward. NCCL's members wait for each other in the first collective,
	 * and for the work queued on their devices: left to the first reduction, some ranks would wait amid their backward and others
	 * after it.
	 */
	connect(): void {
		if (!this.overlaps) return;
		for (const group of new Set(this.#order.map((buffer) => this.groupOf(buffer)))) {
			if (group.size === 1) continue;
			using nothing = Tensor.zeros(this.parameters.device, [1]);
			group.allReduce(nothing).wait();
		}
	}

	/** A buffer's slices are equal only where it was made for a multiple of its group's size. */
	#refuseUnevenSlices(buffer: ParameterBuffer): void {
		const { size } = this.groupOf(buffer);
		if (buffer.frozen || buffer.elements % size === 0) return;
		const first = buffer.entries[0]?.name;
		throw new RangeError(
			`The buffer of ${first} has ${buffer.elements} elements, which ${size} ranks cannot share equally.`,
		);
	}

	groupOf(buffer: ParameterBuffer): Group {
		return buffer.kind.expert ? this.groups.expert : this.groups.dense;
	}

	/** Ranks that together hold a buffer's whole matrices: tensor-parallel ranks in turn, of one replica after the other. */
	matrixGroupOf(buffer: ParameterBuffer): Group {
		const { matrices } = this.groups;
		if (buffer.kind.replicated || matrices === undefined) return this.groupOf(buffer);
		return buffer.kind.expert ? matrices.expert : matrices.dense;
	}

	/** The elements of a buffer whose gradients are final on this rank after reduce(), and which this rank updates. */
	owned(buffer: ParameterBuffer): OwnedRange {
		const { rank, size } = this.groupOf(buffer);
		const counted = (!buffer.kind.replicated || this.countsReplicated) && buffer.kind.copy !== "uncounted";
		if (!this.distributedOptimizer) return { begin: 0, end: buffer.elements, counted: counted && rank === 0 };
		const slice = buffer.elements / size;
		return { begin: rank * slice, end: (rank + 1) * slice, counted };
	}

	/** Tells that the step's last microbatch has completed this parameter's gradient. */
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
	 * Starts the reductions that backward has not started. To be called before this rank waits for any other: replicas whose
	 * reductions run already wait for this rank, and while a reduction runs they cannot create a communicator, which waits for
	 * the device.
	 */
	startSums(): void {
		for (let next = this.#next; next; next = this.#next) this.#pending.push(this.#start(next));
	}

	/** Starts the remaining reductions and waits for all. */
	reduce(): void {
		this.startSums();
		for (const pending of this.#pending.splice(0)) pending.wait();
		this.#expectAll();
	}

	get #next(): ParameterBuffer | undefined {
		return this.#order[this.#pending.length];
	}

	/**
	 * Whether a buffer has to be reduced after the rank's own backward: sums over tensor-parallel ranks use the group that
	 * backward uses, and another stage adds to its copy for as long as its own backward runs.
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
		// Reduce-scatter and all-gather, not all-reduce: NCCL's all-reduce may add in another order, and ZeRO-1 has to change no
		// bit.
		const gathered = group.allGather(slice, gradients);
		return {
			wait() {
				scattered.wait();
				gathered.wait();
			},
		};
	}

	/**
	 * Starts a reduction in bf16, in a copy of the gradients until the sum is back. All replicas start reductions in one order,
	 * so a replica that waits for an early one does not wait for later ones.
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

	/** This rank's slice of a buffer. The caller disposes it. */
	#slice(buffer: ParameterBuffer, whole: Tensor): Tensor {
		const { rank, size } = this.groupOf(buffer);
		const elements = buffer.elements / size;
		return whole.columns(rank * elements, elements);
	}

	/** All-gathers gradients, for inspection: with ZeRO-1 they are otherwise final in each replica's own slice only. */
	gatherGradients(): void {
		if (!this.distributedOptimizer) return;
		for (const buffer of this.parameters.buffers) {
			const group = this.groupOf(buffer);
			if (!buffer.gradients || group.size === 1) continue;
			using slice = this.#slice(buffer, buffer.gradients);
			group.allGather(slice, buffer.gradients).wait();
		}
	}

	/** All-gathers the values that each replica has updated. */
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

/** Data parallelism of a single replica. */
export function singleReplica(parameters: ParameterSet): DataParallel {
	const alone = groupOfOne("dp", 0);
	const groups = { dense: alone, expert: alone, sequenceParallel: null, copies: null };
	return new DataParallel(parameters, groups);
}
