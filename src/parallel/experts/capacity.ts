/** The most rows that may be sent to the experts of a rank: memory for them is set aside before their number is known. */

export interface ExpertCapacity {
	/** Rows that a rank may receive, as a multiple of those of an even routing; null: as many as can ever come. */
	readonly bound: number | null;
	/**
	 * The most tokens of a microbatch that one rank holds between layers in training, so that members need not ask each other;
	 * null: they ask, in every layer.
	 */
	readonly mostTokens: number | null;
}

/** Members of a dispatch group, experts of each, and over how many of them an expert is cut. */
export interface ExpertPlaces {
	readonly members: number;
	readonly expertTensor: number;
	readonly localExperts: number;
}

/** Rows of an even routing, where every member has so many tokens. */
export function balancedRows(tokens: number, topk: number, { expertTensor }: ExpertPlaces): number {
	// The members of an expert each take all its rows.
	return tokens * topk * expertTensor;
}

/** Room for rows: the bound's, at most what can come, which is every token of every member at as many experts as it chooses. */
export function rowCapacity(tokens: number, topk: number, places: ExpertPlaces, bound: number | null): number {
	const most = tokens * Math.min(topk, places.localExperts) * places.members;
	return bound === null ? most : Math.min(most, Math.ceil(bound * balancedRows(tokens, topk, places)));
}
