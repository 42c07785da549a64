/**
 * Combined 1F1B (Megatron's combined_1f1b): the nodes of a forward pass and of another microbatch's backward pass are interleaved, so
 * that one computes while the all-to-all of the other is in flight (docs/spec/moe-performance.md §2). A stage warms up with one more
 * forward pass than in 1F1B, so that the two passes are of different microbatches and never wait for each other.
 *
 * The nodes of a pass, in the order of the forward pass: node 0, everything before the first block; for each block one node, or three
 * if it exchanges experts' rows (compute: up to the start of the dispatch; experts: up to the start of the combine; combine: the
 * rest); a last node, everything after the last block.
 */
import type { Overlap, PassAction, ScheduleShape, WeightGradientAction, Work } from "./actions.ts";

/** Indices of a block's nodes; experts and combine are null if the block exchanges no rows. */
interface BlockNodes {
	readonly compute: number;
	readonly experts: number | null;
	readonly combine: number | null;
}

/** Indices of a pass's nodes. */
interface PassNodes {
	readonly blocks: readonly BlockNodes[];
	readonly last: number;
}

function nodesOf({ exchanges }: Overlap, chunk: number): PassNodes {
	let next = 1;
	const blocks = exchanges[chunk]!.map((exchanging) => {
		const compute = next;
		next += exchanging ? 3 : 1;
		return exchanging
			? { compute, experts: compute + 1, combine: compute + 2 }
			: { compute, experts: null, combine: null };
	});
	return { blocks, last: next };
}

/** Index of the last node of a pass through chunk `chunk` of the stages. */
export function lastNode(overlap: Overlap, chunk: number): number {
	return nodesOf(overlap, chunk).last;
}

/**
 * Interleaves the nodes of each forward pass after the first `warmUp` with those of the backward pass that follows it. Passes of the
 * warm-up and cool-down, and the encoders', stay whole.
 */
export function combinePasses(
	work: readonly PassAction[],
	warmUp: number,
	{ pipeline, overlap, lateWeightGradients }: Pick<ScheduleShape, "pipeline" | "overlap" | "lateWeightGradients">,
): Work[] {
	const result: Work[] = [];
	let begun = 0;
	for (let at = 0; at < work.length; at++) {
		const [forward, backward] = [work[at]!, work[at + 1]];
		const ahead = forward.kind === "forward" && forward.chunk.module === pipeline;
		if (ahead) begun++;
		if (overlap === null || !ahead || begun <= warmUp || backward?.kind !== "backward") {
			result.push(forward);
			continue;
		}
		result.push(...combined(forward, backward, overlap, lateWeightGradients));
		at++;
	}
	return result;
}

/**
 * The nodes of both passes, block against block, in the order in which every rank issues them. `late`: a node's weight gradients are
 * computed after the next node of the forward pass, not beside the gradients of its inputs.
 */
function combined(forward: PassAction, backward: PassAction, overlap: Overlap, late: boolean): Work[] {
	const [f, b] = [nodesOf(overlap, forward.chunk.index), nodesOf(overlap, backward.chunk.index)];
	const ahead = (node: number | null | undefined): PassAction[] =>
		node === null || node === undefined ? [] : [{ ...forward, node }];
	const back = (node: number | null | undefined): PassAction[] =>
		node === null || node === undefined ? [] : [{ ...backward, node }];
	const weights = (node: number | null | undefined): WeightGradientAction[] =>
		!late || node === null || node === undefined ? [] : [{ ...backward, kind: "weight gradient", node }];
	const nodes: Work[] = [...ahead(0), ...back(b.last)];
	const returning = b.blocks.toReversed();
	for (let at = 0; at < Math.max(f.blocks.length, returning.length); at++) {
		const [going, coming] = [f.blocks[at], returning[at]];
		const first = at === returning.length - 1;
		const release = overlap.earlyRelease;
		nodes.push(
			...back(coming?.combine),
			...ahead(going?.compute),
			...back(coming?.experts),
			...weights(coming?.experts),
			...(release ? back(coming?.compute) : []),
			...ahead(going?.experts),
			...(release ? [] : back(coming?.compute)),
			...ahead(going?.combine),
			// The first block's weight gradients come last, after the gradient has been sent to the stage before.
			...(first ? [] : weights(coming?.compute)),
		);
	}
	nodes.push(...ahead(f.last), ...back(0));
	return late ? [...nodes, { ...backward, kind: "weight gradient" }] : nodes;
}
