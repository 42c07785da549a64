/** Checks of the keys of distillation (docs/spec/elastic.md §11). */

import { hasEncoder } from "../derive.ts";
import { parsePattern } from "../hybrid-pattern.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

const needs: readonly (readonly [what: string, holds: (c: TrainingConfiguration) => boolean])[] = [
	[
		"freeze-vit and freeze-projection: the teacher sees the student's image rows",
		(c) => !hasEncoder(c) || c.selfDistillation || (c.freezeVit && c.freezeProjection),
	],
	["a pattern without multi-token prediction", (c) => parsePattern(c.hybridLayerPattern).mtp === null],
	["no adapters", (c) => c.loraRank === null],
	["no z-loss-coeff", (c) => c.zLossCoeff === 0],
];

/** The key that asks for a teacher; null: no key does. */
function teacherKey({ exportKdTeacherLoad, selfDistillation }: TrainingConfiguration): Key | null {
	if (exportKdTeacherLoad !== null) return "export-kd-teacher-load";
	return selfDistillation ? "self-distillation" : null;
}

export const distillationChecks: readonly Check[] = [
	...needs.map(
		([what, holds]): Check =>
			(c) => {
				const key = teacherKey(c);
				return unless(key === null || holds(c), key ?? "self-distillation", `it needs ${what}`);
			},
	),
	(c) => unless(!c.selfDistillation || c.flextron, "self-distillation", "it needs flextron"),
	(c) =>
		unless(
			!c.selfDistillation || c.exportKdTeacherLoad === null,
			"self-distillation",
			"allowed is one of it and export-kd-teacher-load",
		),
	(c) =>
		unless(
			teacherKey(c) !== null || (c.exportKdTemperature === 1 && c.exportKdAlpha === 1),
			c.exportKdTemperature === 1 ? "export-kd-alpha" : "export-kd-temperature",
			"it needs export-kd-teacher-load or self-distillation",
		),
];
