/**
 * Combined 1F1B: a forward pass and the backward pass of another microbatch take turns, node by node, so that while rows of one
 * travel between the ranks that hold experts the other computes (docs/spec/moe-performance.md §2). Stages begin with one more forward
 * pass than in 1F1B: then the two passes of a turn never wait for each other.
 *
 * The nodes of a pass: what enters the first block; of every block one, or three where it exchanges rows: all up to the start of
 * the dispatch, the experts up to the start of the combine, and what comes with the combined rows; what follows the last block.
 */
import type { Overlap, PassAction, ScheduleShape, WeightGradientAction, Work } from "./actions.ts";

/** The nodes of one block by their numbers; experts and combine only where it exchanges rows. */
interface BlockNodes {
	readonly compute: number;
	readonly experts: number | null;
	readonly combine: number | null;
}

/** The numbers of a pass's nodes. */
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

/** The number of the last node of a pass of a chunk of the language model. */
export function lastNode(overlap: Overlap, chunk: number): number {
	return nodesOf(overlap, chunk).last;
}

/**
 * Puts nodes of every forward pass after the first `warmUp` and of the backward pass that follows it in turns: those never wait
 * for each other. Passes before and after, and the encoder's, stay whole.
 */
export function inTurns(
	work: readonly PassAction[],
	warmUp: number,
	{ overlap, lateWeightGradients }: Pick<ScheduleShape, "overlap" | "lateWeightGradients">,
): Work[] {
	const result: Work[] = [];
	let begun = 0;
	for (let at = 0; at < work.length; at++) {
		const [forward, backward] = [work[at]!, work[at + 1]];
		const ahead = forward.kind === "forward" && forward.chunk.module === "language";
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
 * Both passes, block against block, in the order in which their nodes are issued on every rank. `late`: weight gradients wait
 * for the node after that of their inputs' gradients.
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
			// The first block's are left until its gradient has been sent on.
			...(first ? [] : weights(coming?.compute)),
		);
	}
	nodes.push(...ahead(f.last), ...back(0));
	return late ? [...nodes, { ...backward, kind: "weight gradient" }] : nodes;
}
