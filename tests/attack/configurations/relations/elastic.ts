/** Submodels cut out of an elastic parent are the parent under their masks; units that are sorted compute what they did. */
import { readFileSync } from "node:fs";
import { type Case, Wrong } from "../case.ts";
import { numbersOf, requireClose } from "../comparison.ts";
import { readsEnergon } from "../data/reading.ts";
import { argumentsOf, type Draw, type Flags } from "../draw.ts";
import { onGrids, onGridsOf, plainArithmetic } from "../layout/options.ts";
import { evaluated, readingOf } from "./evaluated.ts";
import type { Relation } from "./relation.ts";

const limit = 1e-4;
const parents = { elastic: 1, mtp: 0, vision: 0.15, energon: 0.15 } as const;

/** Trains a parent; Megatron's masks leave out what no submodel leaves out, and are taken away. */
function trainParent(draw: Draw, model: Flags, place: Case): Flags {
	const { "flextron-compat": _, ...own } = model;
	const saving = { "train-iters": "3", "save-interval": "3", save: "own" };
	const flags = plainArithmetic(onGrids(draw, { ...own, ...saving }));
	place.train("own", flags);
	return flags;
}

/** Budgets of the training and one between the two largest. */
function budgetsOf(draw: Draw, flags: Flags): number[] {
	const trained = flags["budget-list"]!.split(",").map(Number);
	if (trained.length === 1) return trained;
	return [...trained, trained[1]! + draw.one([0.25, 0.5, 0.75]) * (trained[0]! - trained[1]!)];
}

export const extracted: Relation = {
	name: "extracted submodels",
	emphasis: parents,
	suits: (flags) => "flextron" in flags,
	hold(draw, model, place) {
		const flags = trainParent(draw, model, place);
		const data = flags["data-path"]!;
		const grids = onGridsOf(draw, flags);
		const whole = evaluated(place, ["--load", "own"], data, grids);
		for (const [at, budget] of budgetsOf(draw, flags).entries()) {
			const alone: Flags = { "is-flex-eval": "true", "override-selected-budget": String(budget) };
			const masked = evaluated(place, ["--load", "own"], data, { ...alone, ...draw.sometimes(0.3, () => grids) });
			const listed = whole.budgets.find((one) => one.budget === budget);
			if (listed !== undefined) requireClose(`evaluate at budget ${budget} alone`, listed.loss, masked.loss, limit);
			place.mimo(["elastic", "extract", "--load=own", `--budget=${budget}`, `--save=part${at}`]);
			const part = evaluated(place, ["--load", `part${at}`], data, readingOf(flags));
			requireClose(`the loss of the submodel of budget ${budget}`, masked.loss, part.loss, limit);
		}
		place.mimo(["elastic", "list", "--load=own", "--log=own.jsonl"]);
		return "ok";
	},
};

/** Scores by their names. */
function scoresOf(place: Case, name: string): [string, number][] {
	return numbersOf(JSON.parse(readFileSync(place.path(name), "utf8")));
}

export const ranked: Relation = {
	name: "ranked and sorted units",
	emphasis: { elastic: 0, adapters: 0, mtp: 0, perLayer: 0.2, vision: 0.2 },
	suits: (flags) => !("lora-rank" in flags) && !flags["hybrid-layer-pattern"]!.includes("/"),
	hold(draw, model, place) {
		const flags = plainArithmetic(onGrids(draw, { ...model, "train-iters": "3", "save-interval": "3", save: "own" }));
		place.train("own", flags);
		const data = flags["data-path"]!;
		// The first few of Energon's samples are others with other lanes.
		const samples = readsEnergon(flags) ? 1000 : 8;
		const rank = (name: string, grids: Flags) =>
			place.mimo([
				...["elastic", "rank", "--load=own", "--data", data, "--device=cpu", `--output=${name}`],
				`--samples=${samples}`,
				...argumentsOf(grids),
			]);
		rank("one.json", {});
		const { "llm-expt-tp": _, ...grids } = onGridsOf(draw, flags);
		rank("other.json", grids);
		const other = new Map(scoresOf(place, "other.json"));
		const most = Math.max(...[...other.values()].map(Math.abs));
		for (const [name, score] of scoresOf(place, "one.json")) {
			const found = other.get(name);
			if (found !== undefined && Math.abs(found - score) <= 1e-3 * most) continue;
			throw new Wrong(`rank: ${name} is ${found} instead of ${score} on ${argumentsOf(grids).join(" ")}`);
		}
		place.mimo(["convert-ckpt", "--permute=one.json", "--to=native", "own", "sorted"]);
		const [before, after] = ["own", "sorted"].map((from) => evaluated(place, ["--load", from], data, readingOf(flags)));
		requireClose("the loss of sorted units", before!.loss, after!.loss);
		return "ok";
	},
};
