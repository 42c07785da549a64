/** Measures the routing imbalance of an earlier run from its log. */

import { linesOf } from "../observe/lines.ts";
import { UserError } from "../system/errors.ts";

/**
 * Rows of the busiest rank's experts over those of an even routing, in the step in which that was most: a mean over
 * layers, because a rank holds all of them. `expertsPerRank`: how the plan's layout deals them out, which may differ
 * from the run's.
 */
export function measuredImbalance(log: string, expertsPerRank: number): number {
	let most = 0;
	for (const line of linesOf(log)) {
		const loads = loadsOf(line);
		if (loads.length > 0) most = Math.max(most, busiestRank(loads, expertsPerRank));
	}
	if (most === 0) throw new UserError(`--expert-imbalance ${log}: this log has no tokens_per_expert.`);
	return most;
}

/** Tokens by layer and expert of a step's line; empty for another line. */
function loadsOf(line: string): number[][] {
	try {
		const { tokens_per_expert: tokens } = JSON.parse(line) as { tokens_per_expert?: Record<string, number[]> };
		return Object.values(tokens ?? {});
	} catch {
		return [];
	}
}

function busiestRank(layers: readonly (readonly number[])[], expertsPerRank: number): number {
	const ranks = layers[0]!.length / expertsPerRank;
	const sums = new Array<number>(ranks).fill(0);
	for (const experts of layers) {
		const even = experts.reduce((sum, tokens) => sum + tokens, 0) / ranks;
		for (const [expert, tokens] of experts.entries()) sums[Math.floor(expert / expertsPerRank)]! += tokens / even;
	}
	return Math.max(...sums) / layers.length;
}
