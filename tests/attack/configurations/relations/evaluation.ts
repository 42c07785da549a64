/** Losses and answers of a trained model, on all grids and beside those that its training measured. */
import { readFileSync, writeFileSync } from "node:fs";
import { png } from "../../../data/fixtures.ts";
import { type Case, Wrong } from "../case.ts";
import { numbersOf, requireClose } from "../comparison.ts";
import { readsEnergon } from "../data/reading.ts";
import { heldOutSamples } from "../data/sets.ts";
import { argumentsOf, type Flags } from "../draw.ts";
import { onGrids, onGridsOf, plainArithmetic } from "../layout/options.ts";
import { hasEncoder } from "../model/vision.ts";
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

/** Prompts of several lengths, one of them with a picture where the model sees. */
function writePrompts(place: Case, flags: Flags): void {
	const image = hasEncoder(flags) ? { image: "a.png" } : {};
	writeFileSync(place.path("a.png"), png(16, 16, 3));
	const records = [
		{ prompt: "In" },
		{ prompt: "a word and", ...image },
		{ prompt: "it" },
		{ prompt: "was the beginning" },
	];
	writeFileSync(place.path("prompts.jsonl"), records.map((record) => JSON.stringify(record)).join("\n"));
}

export const answered: Relation = {
	name: "prompts answered together",
	emphasis: { vision: 0.5, tiling: 0.2 },
	hold(draw, model, place) {
		const long = { "seq-length": "128", "micro-batch-size": "1" };
		const saving = { "train-iters": "3", "save-interval": "3", save: "own" };
		const flags = plainArithmetic(onGrids(draw, { ...model, ...long, ...saving }));
		place.train("own", flags);
		writePrompts(place, flags);
		const drawn = draw.sometimes(0.4, () => ({ temperature: "0.8", "top-k": "20" }));
		const ways: Flags[] = [
			{ "batch-size": "1" },
			{ "batch-size": "4" },
			{ "batch-size": "3", ...onGridsOf(draw, flags) },
		];
		const answers = ways.map((way, at) => {
			const own = { ...drawn, ...way, "max-new-tokens": "6", output: `answers${at}.jsonl` };
			place.mimo(["generate", "--load=own", "--device=cpu", "--input=prompts.jsonl", ...argumentsOf(own)]);
			return readFileSync(place.path(`answers${at}.jsonl`), "utf8");
		});
		return answers.every((answer) => answer === answers[0]) ? "ok" : "tie";
	},
};

/** Evaluations of a training read every held-out sample once where lanes and workers share whole microbatches of them equally. */
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
				...(!readsEnergon(model) && { "valid-data-path": model["data-path"]! }),
			}),
		);
		const log = place.train("own", flags);
		const during = log.findLast((step) => "split" in step)!;
		const after = evaluated(place, ["--load", "own"], flags["data-path"]!, {
			samples: String(heldOutSamples),
			...draw.sometimes(0.5, () => onGridsOf(draw, flags)),
		});
		const workers = readsEnergon(flags) ? Math.max(1, Number(flags["num-workers"])) : 1;
		const shares = Number(flags["llm-dp"] ?? 1) * workers * Number(flags["micro-batch-size"]);
		if (after.samples !== heldOutSamples || heldOutSamples % shares !== 0) return "ok";
		requireClose("evaluate after the training", Number(during["lm loss"]), after.loss);
		for (const { budget, loss } of after.budgets) {
			requireClose(`evaluate at budget ${budget}`, Number(during[`lm loss (budget ${budget})`]), loss);
		}
		return "ok";
	},
};
