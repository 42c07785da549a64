/** The ranks that hold a module's experts, and the ways in which rows reach them. */
import type { ExpertOrder } from "../../tensor/ops/permute.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Group } from "../group.ts";
import type { ExpertCapacity } from "./capacity.ts";

export interface ExchangeMembers {
	/** The dispatch group (tp_ep), or a part of it. */
	readonly group: Group;
	/** Ranks over which one expert's channels are cut. */
	readonly expertTensor: number;
	/** Experts of this rank. */
	readonly localExperts: number;
	readonly capacity: ExpertCapacity;
}

/** Ranks of a module that exchange rows. */
export interface ExpertParallel extends ExchangeMembers {
	/** alltoall: a row for each expert; allgather: all rows to every member; nodes: a row for each node. */
	readonly dispatcher: "alltoall" | "allgather" | ExpertNodes;
}

/** The way of rows to experts of other ranks: a row for each expert, all rows to every member, or a row to each node of consecutive ranks. */
export type Dispatcher = "alltoall" | "allgather" | { readonly ranksPerNode: number };

/** The dispatch group by nodes, each of equally many members side by side. */
export interface ExpertNodes {
	/** The members at this rank's place in every node, in the order of the nodes. */
	readonly between: Group;
	/** The members of this rank's node. */
	readonly within: Group;
}

/** An upper bound of every member's tokens in this layer, equal at all members. */
export function tokensOfAnyMember(
	tape: Tape,
	{ tokens }: Pick<ExpertOrder, "tokens">,
	{ group, capacity }: Pick<ExchangeMembers, "group" | "capacity">,
): number {
	const { mostTokens } = capacity;
	if (mostTokens === null || !tape.training) {
		return Math.max(...group.exchange(Int32Array.of(tokens)).map(([one]) => one!));
	}
	if (tokens > mostTokens) throw new RangeError(`${group.name}: ${tokens} tokens, where ${mostTokens} are the most.`);
	return mostTokens;
}
