/** The forms of a run with fewer data-parallel lanes, for hosts that are lost (--min-lanes). */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { Layout } from "../launch/agents/leader.ts";
import { topologyOf } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";

/**
 * Layouts with fewer and fewer lanes, down to min-lanes, whose ranks fill whole hosts of `perHost`: the global batch stays, so that
 * the data and their order do. `resolve` resolves the configuration with further flags, and throws a UserError where they do not
 * fit. Throws a UserError for a run that cannot go on in another layout.
 */
export async function fewerLanes(
	c: TrainingConfiguration,
	perHost: number,
	resolve: (flags: readonly string[]) => Promise<TrainingConfiguration>,
): Promise<Layout[]> {
	const { minLanes, llmDp, encoderDp } = c;
	if (minLanes === null) return [];
	if (c.save === null)
		throw new UserError("min-lanes: fewer lanes go on from a checkpoint, and the run has no --save.");
	if (c.datasetProvider === "energon") {
		throw new UserError("min-lanes: the state of Energon data belongs to a number of lanes, which cannot change.");
	}
	const layouts: Layout[] = [];
	for (let lanes = llmDp - 1; lanes >= minLanes; lanes--) {
		const encoder = (encoderDp * lanes) / llmDp;
		const values = {
			...{ "llm-dp": lanes, "global-batch-size": c.globalBatchSize, "eval-global-batch-size": c.evalGlobalBatchSize },
			...(encoderDp > 1 && { "encoder-dp": encoder }),
		};
		const flags = Object.entries(values).flatMap(([key, value]) => [`--${key}`, String(value)]);
		try {
			const ranks = topologyOf(await resolve(flags)).worldSize;
			if (ranks % perHost === 0) layouts.push({ ranks, flags });
		} catch (error) {
			// So many lanes do not divide the batch, or the experts.
			if (!(error instanceof UserError)) throw error;
		}
	}
	if (layouts.length > 0) return layouts;
	throw new UserError(
		`min-lanes ${minLanes}: no llm-dp from ${minLanes} to ${llmDp - 1} fits the batch and fills hosts of ${perHost} ranks.`,
	);
}
