/** Names of a run's losses, as Megatron logs them. */

import type { ElasticConfig } from "../elastic/config.ts";
import { parentBudget } from "../elastic/router/budget-loss.ts";
import type { HybridConfig } from "../models/language/config.ts";
import {
	budgetLossName,
	distillationLossName,
	distillationLossOf,
	elasticLosses,
	languageModelLoss,
} from "./losses.ts";
import { depthLoss } from "./mtp-loss.ts";

/** In logging order: next-token loss, MTP depths, distillation, elastic budgets. */
export function lossNames(model: HybridConfig, elastic: ElasticConfig | null, distils: boolean): string[] {
	const depths = Array.from({ length: model.mtp?.depths ?? 0 }, (_, depth) => depthLoss(depth));
	const budget = elastic === null || elastic.router.frozen ? [] : [budgetLossName];
	const taught = elastic === null ? [] : [...elastic.budgets, parentBudget(elastic, model)].map(distillationLossOf);
	return [
		languageModelLoss,
		...depths,
		...(distils ? [distillationLossName, ...new Set(taught)] : []),
		...budget,
		...(elastic === null ? [] : Object.values(elasticLosses)),
	];
}
