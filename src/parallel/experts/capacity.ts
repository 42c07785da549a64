/** Memory for rows of a rank's experts is reserved before their number is known; this bounds it. */

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
export interface ExpertPlaces {
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
