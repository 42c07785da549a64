/** The relations, each as often as its weight. */
import { adapted } from "./adapters.ts";
import { converted, huggingFace } from "./conversion.ts";
import { distilled, wrongTeachers } from "./distillation.ts";
import { extracted, ranked } from "./elastic.ts";
import { answered, judged, measured } from "./evaluation.ts";
import { batches, layouts, layoutsOf } from "./layouts.ts";
import { equivalent, neutral } from "./options.ts";
import { imported, resharded, resumed, stopped } from "./restart.ts";
import { once, sameLanes } from "./samples.ts";
import { tools } from "./tools.ts";

export const relations = [
	...[layouts, ...layoutsOf, batches, sameLanes, sameLanes],
	...[neutral, neutral, neutral, equivalent, equivalent],
	...[resumed, resumed, stopped, resharded, resharded, imported],
	...[converted, huggingFace, adapted, judged, answered, measured, once],
	...[extracted, ranked, distilled, wrongTeachers, tools],
];
