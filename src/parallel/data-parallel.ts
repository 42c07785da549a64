/**
 * Data parallelism over flat parameter buffers: gradients are summed over replicas in fp32, and with ZeRO-1 each replica
 * keeps one equal slice of a buffer: it receives the sum of that slice only, updates it, and the updated values are
 * gathered again.
 */
import { type Group, groupOfOne } from "./group.ts";
import type { ParameterBuffer, ParameterSet } from "./parameter-set.ts";

export interface ReplicaGroups {
	/** Ranks with the same part of dense parameters. */
	readonly dense: Group;
	/** Ranks with the same experts. */
	readonly expert: Group;
	/** Ranks that hold the replicated parameters and different tokens: their gradients are partial sums; or null. */
	readonly sequenceParallel: Group | null;
}

export interface OwnedRange {
	readonly begin: number;
	readonly end: number;
	/** Whether this rank's elements count in norms: of equal copies only one does. */
	readonly counted: boolean;
}

export class DataParallel {
	constructor(
		readonly parameters: ParameterSet,
		readonly groups: ReplicaGroups,
		/** ZeRO-1. */
		readonly distributedOptimizer: boolean,
		/** Whether this rank counts parameters that every tensor-parallel rank holds. */
		readonly countsReplicated: boolean,
	) {}

	groupOf(buffer: ParameterBuffer): Group {
		return buffer.kind.expert ? this.groups.expert : this.groups.dense;
	}

	/** The elements of a buffer whose gradients are final here after reduce(), and which this rank updates. */
	owned(buffer: ParameterBuffer): OwnedRange {
		const { rank, size } = this.groupOf(buffer);
		const counted = !buffer.kind.replicated || this.countsReplicated;
		if (!this.distributedOptimizer) return { begin: 0, end: buffer.elements, counted: counted && rank === 0 };
		const slice = buffer.elements / size;
		return { begin: rank * slice, end: (rank + 1) * slice, counted };
	}

	/** Sums gradients over replicas (and, where tokens are cut, over the ranks that cut them). */
	reduce(): void {
		for (const buffer of this.parameters.buffers) {
			const { gradients } = buffer;
			if (!gradients) continue;
			if (buffer.kind.replicated && this.groups.sequenceParallel) {
				this.groups.sequenceParallel.allReduce(gradients).wait();
			}
			const group = this.groupOf(buffer);
			if (group.size === 1) continue;
			if (this.distributedOptimizer) {
				const { begin, end } = this.owned(buffer);
				using slice = gradients.columns(begin, end - begin);
				group.reduceScatter(gradients, slice).wait();
			} else {
				group.allReduce(gradients).wait();
			}
		}
	}

	/** For who looks at them: every replica has all gradients, which with ZeRO-1 are final in its own slice only. */
	gatherGradients(): void {
		if (!this.distributedOptimizer) return;
		for (const buffer of this.parameters.buffers) {
			const group = this.groupOf(buffer);
			if (!buffer.gradients || group.size === 1) continue;
			const { begin, end } = this.owned(buffer);
			using slice = buffer.gradients.columns(begin, end - begin);
			group.allGather(slice, buffer.gradients).wait();
		}
	}

	/** After an update: every replica has all values again. */
	gather(): void {
		if (!this.distributedOptimizer) return;
		for (const buffer of this.parameters.buffers) {
			const group = this.groupOf(buffer);
			if (buffer.frozen || group.size === 1) continue;
			const { begin, end } = this.owned(buffer);
			using slice = buffer.values.columns(begin, end - begin);
			group.allGather(slice, buffer.values).wait();
		}
	}
}

/** One process holds the only replica. */
export function onlyReplica(parameters: ParameterSet): DataParallel {
	const alone = groupOfOne("dp", 0);
	return new DataParallel(parameters, { dense: alone, expert: alone, sequenceParallel: null }, false, true);
}
