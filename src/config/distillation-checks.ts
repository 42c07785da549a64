/** What the keys of distillation must satisfy (docs/spec/elastic.md §11). */
import { type Check, unless } from "./check.ts";
import { hasEncoder } from "./derive.ts";
import { parsePattern } from "./hybrid-pattern.ts";
import type { TrainingConfiguration } from "./schema.ts";

const needs: readonly (readonly [what: string, holds: (c: TrainingConfiguration) => boolean])[] = [
	["llm-pp 1: a teacher passes no pipeline", (c) => c.llmPp === 1],
	[
		"freeze-vit and freeze-projection: the teacher sees the student's image rows",
		(c) => !hasEncoder(c) || (c.freezeVit && c.freezeProjection),
	],
	["a pattern without multi-token prediction", (c) => parsePattern(c.hybridLayerPattern).prediction === null],
	["no adapters", (c) => c.loraRank === null],
	["no z-loss-coeff", (c) => c.zLossCoeff === 0],
];

export const distillationChecks: readonly Check[] = [
	...needs.map(
		([what, holds]): Check =>
			(c) =>
				unless(c.exportKdTeacherLoad === null || holds(c), "export-kd-teacher-load", `it needs ${what}`),
	),
	(c) =>
		unless(
			c.exportKdTeacherLoad !== null || (c.exportKdTemperature === 1 && c.exportKdAlpha === 1),
			c.exportKdTemperature === 1 ? "export-kd-alpha" : "export-kd-temperature",
			"it needs export-kd-teacher-load",
		),
];
