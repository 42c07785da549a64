/** A student learns the same from a teacher on all grids and from a checkpoint of any format; other models are refused. */
import { type Case, Refused, Wrong } from "../case.ts";
import { requireEqual, requireNear } from "../comparison.ts";
import { type Draw, type Flags, on } from "../draw.ts";
import { refusal } from "../layout/grids.ts";
import { onGrids, onGridsOfLanes, plainArithmetic } from "../layout/options.ts";
import { hasEncoder } from "../model/vision.ts";
import type { Relation } from "./relation.ts";

/** A student of the teacher in the folder `teacher`. */
export function student(draw: Draw, model: Flags, place: Case): Flags {
	return {
		...model,
		"export-kd-teacher-load": place.path("teacher"),
		"export-kd-alpha": draw.one(["1", "0.4"]),
		"export-kd-temperature": draw.one(["1", "2"]),
		...(hasEncoder(model) && { "freeze-vit": on, "freeze-projection": on }),
	};
}

export function trainTeacher(place: Case, model: Flags, more: Flags = {}): void {
	place.train("teacher", { ...model, ...more, seed: "77", "train-iters": "3", "save-interval": "3", save: "teacher" });
}

/** Keys that make another model, and another size of each. */
const otherSizes: readonly Flags[] = [
	{ "hidden-size": "40" },
	{ "ffn-hidden-size": "40", "hybrid-layer-pattern": "-M" },
	{ "kv-channels": "12", "hybrid-layer-pattern": "*-" },
];

export const distilled: Relation = {
	name: "distilled",
	emphasis: { adapters: 0, mtp: 0, elastic: 0.15, vision: 0.25 },
	suits: (flags) =>
		!/[/]/.test(flags["hybrid-layer-pattern"]!) && !("lora-rank" in flags) && !("z-loss-coeff" in flags),
	hold(draw, model, place) {
		const { "self-distillation": _, ...own } = model;
		const flags = plainArithmetic(student(draw, own, place));
		const sentence = refusal(flags);
		if (sentence !== null) throw new Refused(sentence);
		trainTeacher(place, plainArithmetic(onGrids(draw, own)));
		const first = plainArithmetic(onGrids(draw, flags));
		const expected = place.train("first", first);
		const to = draw.one(["native", "torch_dist"]);
		place.mimo(["convert-ckpt", `--to=${to}`, "teacher", "converted"]);
		const again = place.train("again", { ...first, "export-kd-teacher-load": place.path("converted") });
		requireEqual(`the teacher as ${to}`, expected, again);
		const other = place.train("other", plainArithmetic(onGridsOfLanes(draw, first)));
		return requireNear("a teacher on other grids", expected, other) ? "ok" : "tie";
	},
};

export const wrongTeachers: Relation = {
	name: "teachers of other sizes",
	emphasis: { adapters: 0, mtp: 0, elastic: 0, vision: 0.1 },
	suits: (flags) => !("lora-rank" in flags) && !("z-loss-coeff" in flags),
	hold(draw, model, place) {
		const other = { ...model, ...draw.one(otherSizes) };
		if (refusal(other) !== null) throw new Refused(refusal(other)!);
		trainTeacher(place, plainArithmetic(other));
		try {
			place.train("student", onGrids(draw, student(draw, model, place)));
		} catch (error) {
			if (!(error instanceof Refused)) throw error;
			if (/another model: --/.test(error.message)) return "ok";
			throw new Wrong(`the refusal names no key: ${error.message}`);
		}
		throw new Wrong("a teacher of other sizes is taken");
	},
};
