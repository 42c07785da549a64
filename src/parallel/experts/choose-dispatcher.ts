/** The token dispatcher that sends the fewest rows (--moe-token-dispatcher-type auto, docs/spec/moe-performance.md §2.4). */
import type { Dispatcher, ExpertParallel } from "./members.ts";

/** Inputs of the choice beside the ranks. */
export interface DispatcherChoice {
	/** Experts of a token. */
	readonly topk: number;
	/** Consecutive ranks that are a node. */
	readonly ranksPerNode: number;
	/** Whether the room for rows is bounded, which gathered rows have no bound for. */
	readonly bounded: boolean;
}

export function isChoice(wanted: Dispatcher | DispatcherChoice): wanted is DispatcherChoice {
	return typeof wanted === "object" && "topk" in wanted;
}

/** The dispatch group's global ranks, and the number of them that share an expert. */
interface DispatchRanks {
	readonly ranks: readonly number[];
	readonly expertTensor: number;
}

/** Rows that a rank sends for each of its tokens, one way, under an even routing within one node. */
function rowsOf({ ranks, expertTensor }: DispatchRanks, topk: number) {
	const others = ranks.length - 1;
	return { alltoall: (topk * others * expertTensor) / ranks.length, allgather: others };
}

/**
 * Over several nodes of equally many ranks: flex, by which a row crosses to a node once, however many of its experts are there. Within
 * one: allgather where that is fewer rows, alltoall otherwise.
 */
export function chooseDispatcher(group: DispatchRanks, { topk, ranksPerNode, bounded }: DispatcherChoice): Dispatcher {
	const nodes = [...Map.groupBy(group.ranks, (rank) => Math.floor(rank / ranksPerNode)).values()];
	if (nodes.length > 1) {
		const size = nodes[0]!.length;
		const even = size % group.expertTensor === 0 && nodes.every((members) => members.length === size);
		return even ? { ranksPerNode } : "alltoall";
	}
	const { alltoall, allgather } = rowsOf(group, topk);
	return allgather < alltoall && !bounded ? "allgather" : "alltoall";
}

/** Says what was chosen, and why. */
export function describeChoice(
	{ dispatcher, group, expertTensor }: Pick<ExpertParallel, "dispatcher" | "group" | "expertTensor">,
	{ topk, bounded }: DispatcherChoice,
): string {
	const start = "moe-token-dispatcher-type auto is";
	if (typeof dispatcher === "object") {
		return `${start} flex: experts are on ${dispatcher.between.size} nodes, and a row goes to each once.`;
	}
	const rows = rowsOf({ ranks: group.ranks, expertTensor }, topk);
	const shown = (count: number) => `${Number(count.toFixed(2))}`;
	const less = rows.allgather < rows.alltoall;
	const compared = `alltoall sends ${shown(rows.alltoall)} rows a token to the other ranks, allgather ${shown(rows.allgather)}`;
	const why = less && dispatcher === "alltoall" && bounded ? ", without a bound" : "";
	return `${start} ${dispatcher}: ${compared}${why}.`;
}
