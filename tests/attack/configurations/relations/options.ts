/** Options that order work change no bit; options that order sums change rounding alone. */
import { requireEqual, requireNear } from "../comparison.ts";
import { argumentsOf, type Flags } from "../draw.ts";
import { allowed, drawEquivalent, drawNeutral, onGrids, plainArithmetic } from "../layout/options.ts";
import type { Relation } from "./relation.ts";

export const neutral: Relation = {
	name: "neutral options",
	hold(draw, model, place) {
		const flags = onGrids(draw, model);
		let more: Flags = {};
		for (let attempt = 0; attempt < 10 && Object.keys(more).length === 0; attempt++) {
			more = allowed(flags, drawNeutral(draw, flags));
		}
		const plain = place.train("plain", flags);
		const other = place.train("other", { ...flags, ...more });
		const evaluated = "eval-iters" in more;
		requireEqual(argumentsOf(more).join(" "), plain, evaluated ? other.filter((step) => !("split" in step)) : other);
		if ("profile-step-start" in more) place.mimo(["trace", "summary", "trace.json"]);
		place.mimo(["report", "other.jsonl", "--output", "report.html"]);
		return "ok";
	},
};

export const equivalent: Relation = {
	name: "equivalent options",
	hold(draw, model, place) {
		const flags = plainArithmetic(onGrids(draw, model));
		let more: Flags = {};
		for (let attempt = 0; attempt < 10 && Object.keys(more).length === 0; attempt++) {
			more = allowed(flags, drawEquivalent(draw, flags));
		}
		const plain = place.train("plain", flags);
		const other = place.train("other", { ...flags, ...more });
		return requireNear(argumentsOf(more).join(" "), plain, other) ? "ok" : "tie";
	},
};
