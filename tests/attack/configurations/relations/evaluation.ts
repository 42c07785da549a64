/** Losses and answers of a trained model, on all grids and beside those that its training measured. */
import { Wrong } from "../case.ts";
import { numbersOf, requireClose } from "../comparison.ts";
import { readsEnergon } from "../data/reading.ts";
import { heldOutSamples } from "../data/sets.ts";
import { argumentsOf, type Flags } from "../draw.ts";
import { onGrids, onGridsOf, plainArithmetic } from "../layout/options.ts";
import { evaluated } from "./evaluated.ts";
import type { Relation } from "./relation.ts";

export const judged: Relation = {
	name: "evaluated and generated",
	hold(draw, model, place) {
		const flags: Flags = {
			...plainArithmetic(onGrids(draw, model)),
			"train-iters": "3",
			"save-interval": "3",
			save: "own",
		};
		place.train("own", flags);
		const data = flags["data-path"]!;
		const batch = ["--load", "own", "--device=cpu"];
		const grids = [{}, onGridsOf(draw, flags)];
		const losses = grids.map((some) =>
			numbersOf(
				JSON.parse(
					place.mimo(["evaluate", ...batch, "--data", data, "--samples", "1000", "--json", ...argumentsOf(some)]),
				),
			),
		);
		losses[0]!.forEach(([name, value], at) => {
			const other = losses[1]![at]?.[1];
			const near = other !== undefined && Math.abs(other - value) <= 1e-4 * Math.max(1e-6, Math.abs(value));
			if (!near)
				throw new Wrong(`evaluate: ${name} is ${other} instead of ${value} on ${argumentsOf(grids[1]!).join(" ")}`);
		});
		const answers = grids.map((some) =>
			place.mimo(["generate", ...batch, "--prompt", "In", "--max-new-tokens", "5", ...argumentsOf(some)]),
		);
		return answers[0] === answers[1] ? "ok" : "tie";
	},
};

/** Evaluations of a training read every held-out sample once where lanes and workers share them equally. */
export const measured: Relation = {
	name: "evaluated while training",
	emphasis: { energon: 0.6, elastic: 0.25 },
	suits: (flags) => !("packing-buffer-size" in flags) || !readsEnergon(flags),
	hold(draw, model, place) {
		const rounds = heldOutSamples / Number(model["global-batch-size"]);
		const flags = plainArithmetic(
			onGrids(draw, {
				...model,
				...{ "train-iters": "4", "save-interval": "4", save: "own" },
				...{ "eval-interval": "4", "eval-iters": String(rounds) },
			}),
		);
		const log = place.train("own", flags);
		const during = log.findLast((step) => "split" in step)!;
		const after = evaluated(place, ["--load", "own"], flags["data-path"]!, {
			samples: String(heldOutSamples),
			...draw.sometimes(0.5, () => onGridsOf(draw, flags)),
		});
		if (!readsEnergon(flags)) return "ok";
		const shares = Number(flags["llm-dp"] ?? 1) * Math.max(1, Number(flags["num-workers"]));
		if (after.samples !== heldOutSamples || heldOutSamples % shares !== 0) return "ok";
		requireClose("evaluate after the training", Number(during["lm loss"]), after.loss);
		for (const { budget, loss } of after.budgets) {
			requireClose(`evaluate at budget ${budget}`, Number(during[`lm loss (budget ${budget})`]), loss);
		}
		return "ok";
	},
};
