/**
 * Deals items that lanes have read out to the lanes that work on them, so that the lane with the most work has little
 * more than the others (docs/spec/runtime.md §2.4). Every lane computes it from the same numbers and gets the same.
 */

/** Ratio of a lane's work to that in the most even deal, allowed where fewer items move: a move costs about as much. */
const slack = 1.01;

interface Item {
	readonly home: number;
	readonly place: number;
	readonly cost: number;
}

/** Costs of the items of a microbatch, or the lanes that work on them, by the lane that has read them. */
export type ByLane = readonly (readonly number[])[];

/** Moments at which lanes wait for each other even if they keep what they have read. */
export type LanesMeet = "every microbatch" | "every step";

/**
 * Deals of a step's microbatches. Lanes that share items wait for each other in every microbatch; where they would else
 * meet at the end of the step alone, and that takes no longer, all items stay.
 */
export function dealStep(microbatches: readonly ByLane[], meet: LanesMeet): ByLane[] {
	const dealt = microbatches.map(dealByCost);
	if (meet === "every microbatch") return dealt;
	const [apart, together] = [new Array<number>(microbatches[0]?.length ?? 0).fill(0), { most: 0 }];
	for (const [index, costs] of microbatches.entries()) {
		for (const [lane, own] of costs.entries()) for (const cost of own) apart[lane]! += cost;
		together.most += Math.max(...workOf(costs, dealt[index]!));
	}
	return together.most < Math.max(0, ...apart) ? dealt : microbatches.map(atHome);
}

/** Cost that every lane has under a deal. */
export function workOf(costs: ByLane, deal: ByLane): number[] {
	const work = costs.map(() => 0);
	for (const [home, lanes] of deal.entries()) {
		for (const [place, lane] of lanes.entries()) work[lane]! += costs[home]![place]!;
	}
	return work;
}

/** Every item with the lane that has read it. */
export function atHome(costs: ByLane): ByLane {
	return costs.map((own, home) => own.map(() => home));
}

/**
 * The lane that works on each item, by the lane that has read it. `costs`: of the items of every lane, above 0. Items go
 * largest first to the lane with the least (at most 4/3 of the least possible maximum), but stay where that is not worse.
 */
export function dealByCost(costs: ByLane): ByLane {
	const items = costs
		.flatMap((own, home) => own.map((cost, place): Item => ({ home, place, cost })))
		.sort((a, b) => b.cost - a.cost || a.home - b.home || a.place - b.place);
	const anywhere = dealWithin(items, costs, 0);
	const unmoved = dealWithin(items, costs, Number.POSITIVE_INFINITY);
	const mostlyAtHome = dealWithin(items, costs, anywhere.most);
	const least = Math.min(anywhere.most, unmoved.most, mostlyAtHome.most);
	return [unmoved, mostlyAtHome, anywhere].find(({ most }) => most <= slack * least)!.lanes;
}

/** Largest first: to its home as long as that has at most `bound`, else to the lane with the least. */
function dealWithin(items: readonly Item[], costs: ByLane, bound: number) {
	const loads = costs.map(() => 0);
	const lanes = costs.map((own) => own.map(() => 0));
	for (const { home, place, cost } of items) {
		const lane = loads[home]! + cost <= bound ? home : loads.indexOf(Math.min(...loads));
		loads[lane]! += cost;
		lanes[home]![place] = lane;
	}
	return { lanes, most: Math.max(...loads) };
}
