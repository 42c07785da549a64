/** Measures the routing imbalance of an earlier run from its log. */

import { checkedFields, entryText, LARGEST_LOG_LINE, parseEntry } from "../observe/run-log/entry.ts";
import { largestOf } from "../observe/statistics.ts";
import { UserError } from "../system/errors.ts";
import { linesOf } from "../system/input-file.ts";

/**
 * Rows of the busiest rank's experts over those of an even routing, in the step in which that was most: a mean over
 * layers, because a rank holds all of them. `expertsPerRank`: how the plan's layout deals them out, which may differ
 * from the run's.
 */
export function measuredImbalance(log: string, expertsPerRank: number): number {
	let most = 0;
	for (const { number, bytes } of linesOf(log, { limit: LARGEST_LOG_LINE, unended: false })) {
		const name = `${log}, line ${number}`;
		const entry = parseEntry(entryText(bytes, name));
		const loads = entry === null ? [] : checkedFields(entry, name).experts.map(([, counts]) => counts);
		if (loads.length > 0) most = Math.max(most, busiestRank(loads, expertsPerRank));
	}
	if (most === 0) throw new UserError(`--expert-imbalance ${log}: this log has no tokens_per_expert.`);
	return most;
}

function busiestRank(layers: readonly (readonly number[])[], expertsPerRank: number): number {
	const ranks = layers[0]!.length / expertsPerRank;
	const sums = new Array<number>(ranks).fill(0);
	for (const experts of layers) {
		const even = experts.reduce((sum, tokens) => sum + tokens, 0) / ranks;
		for (const [expert, tokens] of experts.entries()) sums[Math.floor(expert / expertsPerRank)]! += tokens / even;
	}
	return largestOf(sums) / layers.length;
}
