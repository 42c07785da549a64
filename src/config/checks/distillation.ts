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

/** The key that weighs the losses without a file; null: none does. */
function weighed({ exportKdTemperature, exportKdAlpha }: TrainingConfiguration): Key | null {
	if (exportKdTemperature !== 1) return "export-kd-temperature";
	return exportKdAlpha === 1 ? null : "export-kd-alpha";
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
			teacherKey(c) !== null || (weighed(c) === null && c.exportKdCfg === null),
			weighed(c) ?? "export-kd-cfg",
			"it needs export-kd-teacher-load or self-distillation",
		),
	(c) => unless(weighed(c) === null || c.exportKdCfg === null, weighed(c)!, "allowed is one of it and export-kd-cfg"),
];
