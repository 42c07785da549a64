/** Samples are read once each, and by other lanes of ranks the same ones in the same order. */
import { Wrong } from "../case.ts";
import { requireClose, requireNear } from "../comparison.ts";
import { readsEnergon } from "../data/reading.ts";
import { heldOutSamples } from "../data/sets.ts";
import { argumentsOf, type Flags } from "../draw.ts";
import { onGrids, onGridsOf, onGridsOfLanes, plainArithmetic } from "../layout/options.ts";
import { evaluated } from "./evaluated.ts";
import type { Relation } from "./relation.ts";

export const once: Relation = {
	name: "each sample once",
	emphasis: { energon: 1, vision: 0.6, tiling: 0.4 },
	suits: readsEnergon,
	hold(draw, model, place) {
		const flags = plainArithmetic(onGrids(draw, { ...model, "train-iters": "3", "save-interval": "3", save: "own" }));
		place.train("own", flags);
		const data = flags["data-path"]!;
		const first = evaluated(place, ["--load", "own"], data);
		if (first.samples > heldOutSamples) throw new Wrong(`evaluate: ${first.samples} of ${heldOutSamples} samples`);
		for (let run = 0; run < 2; run++) {
			const more: Flags = {
				...onGridsOf(draw, flags),
				"num-workers": draw.one(["0", "1", "3", "5", "7"]),
				"batch-size": draw.one(["1", "3", "8"]),
			};
			const other = evaluated(place, ["--load", "own"], data, more);
			const what = `evaluate with ${argumentsOf(more).join(" ")}`;
			for (const count of ["samples", "tokens"] as const) {
				if (other[count] !== first[count]) throw new Wrong(`${what}: ${other[count]} ${count}, not ${first[count]}`);
			}
			requireClose(what, first.loss, other.loss);
		}
		return "ok";
	},
};

export const sameLanes: Relation = {
	name: "grids of the same lanes",
	// Lanes whose experts share ranks draw the same sizes of an elastic model, and other grids share other lanes' experts.
	emphasis: { energon: 0.7, vision: 0.7, tiling: 0.3, elastic: 0 },
	hold(draw, model, place) {
		const { "encoder-grad-participation": _, ...own } = model;
		const flags = plainArithmetic(onGrids(draw, own));
		const expected = place.train("first", flags);
		const other = place.train("other", plainArithmetic(onGridsOfLanes(draw, flags)));
		return requireNear("on grids of as many lanes", expected, other) ? "ok" : "tie";
	},
};
