/**
 * The random draws of every microbatch: its budget, the noise of its router and whether its sample is one-hot (docs/spec/elastic.md
 * §4, §5). Philox is keyed by seed, iteration, microbatch and purpose, so a resumed training draws the same, and neither
 * evaluations nor pipeline stages change it.
 */
import { philoxKey } from "../../../models/initialise.ts";
import { philox4x32 } from "../../../models/philox.ts";
import type { ElasticConfig } from "../config.ts";
import type { Draw, DrawnBudget } from "./network.ts";

/** A microbatch of a step. */
export interface DrawPlace {
	/** From 0. */
	readonly iteration: number;
	/** Among its lane's microbatches of the step. */
	readonly microbatch: number;
	/** Lanes whose experts share ranks draw the same noise: number of their set. */
	readonly lanes: number;
}

/** Uniform in (0, 1), of 53 bits. */
function uniform(config: ElasticConfig, place: string, counter = 0): number {
	const [high, low] = philox4x32(philoxKey(config.seed, `elastic_router.${place}`), counter);
	return ((high >>> 6) * 2 ** 27 + (low >>> 5) + 0.5) / 2 ** 53;
}

/** The budget of a microbatch, the same in every lane. `parent`: the parent's own. */
export function drawBudget(
	config: ElasticConfig,
	{ iteration, microbatch }: Pick<DrawPlace, "iteration" | "microbatch">,
	parent: number,
): DrawnBudget {
	const place = `budget.${iteration}.${microbatch}`;
	if (uniform(config, place) < config.parentProbability) return { value: parent, parent: true };
	const { budgets } = config;
	const weights = config.budgetProbabilities ?? budgets.map(() => 1);
	const sum = weights.reduce((total, weight) => total + weight, 0);
	let left = uniform(config, place, 1) * sum;
	const at = weights.findIndex((weight) => {
		left -= weight;
		return left < 0;
	});
	const value = budgets[at < 0 ? budgets.length - 1 : at]!;
	return { value, parent: value === parent };
}

/** `parent`: the parent's own budget. */
export function drawFor(config: ElasticConfig, place: DrawPlace, parent: number): Draw {
	const { iteration, microbatch, lanes } = place;
	const of = (what: string) => `${what}.${iteration}.${lanes}.${microbatch}`;
	return {
		budget: drawBudget(config, place, parent),
		hard: uniform(config, of("hard")) > config.hardThreshold,
		noise: ({ name, sizes, layers }) =>
			Float64Array.from(
				{ length: (layers?.length ?? 1) * sizes.length },
				(_, at) => -Math.log(-Math.log(uniform(config, of(`noise.${name}`), at))),
			),
	};
}
