/** A training that stops and goes on is the uninterrupted one. */
import { join } from "node:path";
import type { Case } from "../case.ts";
import { requireEqual, requireNear, requireSame } from "../comparison.ts";
import { readsEnergon } from "../data/reading.ts";
import { argumentsOf, type Draw, type Flags, on } from "../draw.ts";
import { refusal } from "../layout/grids.ts";
import {
	allowed,
	drawNeutral,
	onGrids,
	onGridsOfLanes,
	plainArithmetic,
	poolsMicrobatches,
	unpooled,
} from "../layout/options.ts";
import { student, trainTeacher } from "./distillation.ts";
import type { Relation } from "./relation.ts";

/** Sometimes with a teacher of other weights. */
function taught(draw: Draw, model: Flags, place: Case): Flags {
	const kd = student(draw, model, place);
	if (draw.chance(0.85) || "flextron" in model || refusal(kd) !== null) return model;
	trainTeacher(place, model);
	return kd;
}

export const resumed: Relation = {
	name: "resumed",
	hold(draw, model, place) {
		const flags = {
			...onGrids(draw, taught(draw, model, place)),
			"train-iters": "4",
			"save-interval": "2",
			...draw.sometimes(0.3, () => ({ "eval-interval": "2", "eval-iters": "1" })),
		};
		const async = draw.sometimes(0.5, () => ({ "async-save": on }));
		const whole = place.train("whole", { ...flags, ...async, save: "whole" });
		const after = whole.filter(({ iteration }) => Number(iteration) > 2);
		if (draw.chance(0.5)) {
			const order = draw.chance(0.5) ? allowed(flags, drawNeutral(draw, flags)) : {};
			const { "eval-interval": _, "eval-iters": __, save: ___, "save-interval": ____, ...more } = order;
			const rest = place.train("rest", { ...flags, ...more, save: "rest", load: "whole", "ckpt-step": "2" });
			requireEqual(`resumed at step 2 with ${argumentsOf(more).join(" ")}`, after, rest);
		} else {
			const again = { ...flags, ...async, save: "rest", load: "rest" };
			place.train("rest", { ...again, "exit-interval": "2" });
			requireEqual("stopped at step 2 and started again", whole, place.train("rest", again));
		}
		requireSame("the weights of the resumed run", place.tensors("whole"), place.tensors("rest"));
		return "ok";
	},
};

/** Ways of ending a run that is to be started again; the seconds reach from its start to its steps. */
function drawEnd(draw: Draw): { readonly flags: Flags; readonly signal: string | null } {
	if (draw.chance(0.25)) return { flags: { "exit-duration-in-mins": "0.000001" }, signal: null };
	const signal = draw.one(["USR1", "TERM", "INT", "KILL"]);
	return { flags: draw.sometimes(0.7, () => ({ "exit-signal-handler": on })), signal };
}

export const stopped: Relation = {
	name: "stopped and started again",
	hold(draw, model, place) {
		const saving = { "train-iters": "12", "save-interval": draw.one(["1", "3", "5"]) };
		const flags = {
			...onGrids(draw, { ...model, ...saving }),
			...draw.sometimes(0.5, () => ({ "async-save": on })),
			...draw.sometimes(0.3, () => ({ keep: "1" })),
		};
		const whole = place.train("whole", { ...flags, save: "whole" });
		const again: Flags = { ...flags, save: "rest", load: "rest" };
		for (let run = 0; run < 3; run++) {
			const end = drawEnd(draw);
			place.stop({ ...again, ...end.flags, "log-json": "rest.jsonl" }, end.signal, 0.4 + 0.2 * draw.whole(0, 8));
		}
		place.train("rest", again);
		// Steps that a run did again count once, the last time.
		const found = new Map(place.log("rest").map((step) => [step.iteration, step]));
		const last = whole.filter(({ iteration }) => found.has(iteration));
		requireEqual("stopped and started again", last, [...found.values()]);
		requireSame("the weights of the stopped run", place.tensors("whole"), place.tensors("rest"));
		return "ok";
	},
};

export const resharded: Relation = {
	name: "resumed on other grids",
	emphasis: { adapters: 0.2 },
	suits: (flags) => !poolsMicrobatches(unpooled(flags)) || readsEnergon(flags),
	hold(draw, model, place) {
		const { "encoder-grad-participation": _, ...own } = model;
		const flags: Flags = { ...plainArithmetic(unpooled(own)), "save-interval": "2" };
		const begun = plainArithmetic(onGrids(draw, flags));
		const whole = place.train("whole", { ...begun, save: "whole" });
		const free = !readsEnergon(flags);
		const other = free ? plainArithmetic(onGrids(draw, flags)) : onGridsOfLanes(draw, begun);
		const rest = place.train("rest", { ...other, save: "rest", load: "whole", "ckpt-step": "2" });
		const expected = whole.filter(({ iteration }) => Number(iteration) > 2);
		return requireNear("resumed at step 2 on other grids", expected, rest) ? "ok" : "tie";
	},
};

/** Of text, whose place follows from the step: Megatron's format has no place for that of Energon's data. */
export const imported: Relation = {
	name: "resumed from torch_dist",
	emphasis: { adapters: 0, energon: 0, vision: 0 },
	suits: (flags) => !("lora-rank" in flags) && !("flextron" in flags) && !readsEnergon(flags),
	hold(draw, model, place) {
		const flags: Flags = { ...onGrids(draw, model), "save-interval": "2" };
		const whole = place.train("whole", { ...flags, save: "whole" });
		const names = draw.sometimes(model["hybrid-layer-pattern"]!.includes("[") ? 0.5 : 0, () => ({
			"layer-names": "logical",
		}));
		const from = join("whole", "iter_0000002");
		const pattern = "layer-names" in names ? [`--hybrid-layer-pattern=${flags["hybrid-layer-pattern"]}`] : [];
		place.mimo(["convert-ckpt", "--to=torch_dist", ...argumentsOf(names), ...pattern, from, "there"]);
		const rest = place.train("rest", { ...flags, save: "rest", load: "there" });
		const expected = whole.filter(({ iteration }) => Number(iteration) > 2);
		requireEqual("resumed at step 2 from torch_dist", expected, rest);
		requireSame("the weights of the resumed run", place.tensors("whole"), place.tensors("rest"));
		return "ok";
	},
};
