/** The ranks that hold a module's experts, and the token dispatcher between them. */
import type { ExpertOrder, Tape } from "../../tensor/index.ts";
import type { Group } from "../group.ts";

export interface ExchangeMembers {
	/** The dispatch group (tp_ep), or a part of it. */
	readonly group: Group;
	/** Ranks over which an expert's channels are sharded. */
	readonly expertTensor: number;
	/** Number of experts on this rank. */
	readonly localExperts: number;
	readonly capacity: ExpertCapacity;
}

/** Ranks of a module that exchange rows. */
export interface ExpertParallel extends ExchangeMembers {
	/**
	 * alltoall: a row for each expert; allgather: all rows to every member; nodes: a row for each node that holds any of the
	 * token's experts.
	 */
	readonly dispatcher: "alltoall" | "allgather" | ExpertNodes;
}

/**
 * Configured token dispatcher: a row for each expert, all rows to every member, or a row for each node of `ranksPerNode`
 * consecutive ranks.
 */
export type Dispatcher = "alltoall" | "allgather" | { readonly ranksPerNode: number };

/** The dispatch group split into nodes of equally many consecutive members. */
export interface ExpertNodes {
	/** The members at this rank's position in each node, in node order. */
	readonly between: Group;
	/** The members of this rank's node. */
	readonly within: Group;
}

/** Upper bound of each member's tokens in this layer, equal at all members. */
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

// Memory for rows of a rank's experts is reserved before their number is known; this bounds it.

export interface ExpertCapacity {
	/** Largest number of rows as a multiple of a balanced routing's; null: as many as can be routed there. */
	readonly bound: number | null;
	/**
	 * Largest number of a microbatch's tokens on one rank in training, which lets members skip an exchange of counts; null: they
	 * exchange counts in every layer.
	 */
	readonly mostTokens: number | null;
}

/** Size of the dispatch group, experts of each member, and the number of members that share an expert. */
interface ExpertPlaces {
	readonly members: number;
	readonly expertTensor: number;
	readonly localExperts: number;
}

/** Rows of a rank's experts under a balanced routing of `tokens` tokens a member. */
export function balancedRows(tokens: number, topk: number, { expertTensor }: ExpertPlaces): number {
	// Each member that shares an expert takes all of its rows.
	return tokens * topk * expertTensor;
}

/**
 * Rows to reserve: the bound, at most the largest possible number (every token of every member at as many local experts as it can
 * choose).
 */
export function rowCapacity(tokens: number, topk: number, places: ExpertPlaces, bound: number | null): number {
	const most = tokens * Math.min(topk, places.localExperts) * places.members;
	return bound === null ? most : Math.min(most, Math.ceil(bound * balancedRows(tokens, topk, places)));
}
