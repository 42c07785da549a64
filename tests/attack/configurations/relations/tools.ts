/** Plans and what is printed before a run. */
import { Wrong } from "../case.ts";
import { numbersOf } from "../comparison.ts";
import { argumentsOf } from "../draw.ts";
import { onGrids } from "../layout/options.ts";
import type { Relation } from "./relation.ts";

export const tools: Relation = {
	name: "planned and printed",
	hold(draw, model, place) {
		const flags = argumentsOf(onGrids(draw, model));
		place.mimo(["train", ...flags, "--print-config"]);
		place.mimo(["train", ...flags, "--print-topology"]);
		place.mimo(["train", ...flags, "--print-schedule"]);
		const plan = place.mimo(["plan", ...flags, "--json"]);
		for (const [name, value] of numbersOf(JSON.parse(plan))) {
			if (!Number.isFinite(value) || value < 0) throw new Wrong(`plan: ${name} is ${value}`);
		}
		return "ok";
	},
};
