/**
 * Balances the items that lanes have read over the lanes, so that the busiest lane has little more work than the others
 * (docs/spec/runtime.md §2.4). Every lane computes the assignment from the same costs and gets the same result.
 */

/** An assignment that moves fewer items is preferred if its busiest lane has at most this times the least work: moves cost time too. */
const slack = 1.01;

interface Item {
	readonly home: number;
	readonly place: number;
	readonly cost: number;
}

/** [lane that has read the item][item]: costs of a microbatch's items, or the lanes they are assigned to. */
export type ByLane = readonly (readonly number[])[];

/** How often lanes wait for each other even if no item moves. */
export type LaneBarrier = "every microbatch" | "every step";

/**
 * The assignment of each of a step's microbatches. Moving items makes lanes wait for each other in every microbatch; if they would
 * otherwise wait once a step only, and moving shortens the step by nothing, no item moves.
 */
export function balanceStep(microbatches: readonly ByLane[], meet: LaneBarrier): ByLane[] {
	const dealt = microbatches.map(balanceByCost);
	if (meet === "every microbatch") return dealt;
	const [apart, together] = [new Array<number>(microbatches[0]?.length ?? 0).fill(0), { most: 0 }];
	for (const [index, costs] of microbatches.entries()) {
		for (const [lane, own] of costs.entries()) for (const cost of own) apart[lane]! += cost;
		together.most += Math.max(...workOf(costs, dealt[index]!));
	}
	return together.most < Math.max(0, ...apart) ? dealt : microbatches.map(asRead);
}

/** Sum of the costs assigned to each lane. */
export function workOf(costs: ByLane, assigned: ByLane): number[] {
	const work = costs.map(() => 0);
	for (const [home, lanes] of assigned.entries()) {
		for (const [place, lane] of lanes.entries()) work[lane]! += costs[home]![place]!;
	}
	return work;
}

/** The assignment that moves no item. */
export function asRead(costs: ByLane): ByLane {
	return costs.map((own, home) => own.map(() => home));
}

/**
 * Assigns the items of one microbatch. `costs`: above 0. Items are assigned largest first to the lane with the least work (LPT: at
 * most 4/3 of the optimal maximum), but stay with the lane that has read them if the maximum is no larger.
 */
export function balanceByCost(costs: ByLane): ByLane {
	const items = costs
		.flatMap((own, home) => own.map((cost, place): Item => ({ home, place, cost })))
		.sort((a, b) => b.cost - a.cost || a.home - b.home || a.place - b.place);
	const anywhere = assignWithin(items, costs, 0);
	const unmoved = assignWithin(items, costs, Number.POSITIVE_INFINITY);
	const mostlyAtHome = assignWithin(items, costs, anywhere.most);
	const least = Math.min(anywhere.most, unmoved.most, mostlyAtHome.most);
	return [unmoved, mostlyAtHome, anywhere].find(({ most }) => most <= slack * least)!.lanes;
}

/** Largest item first: to the lane that has read it while that lane's work stays within `bound`, else to the lane with the least work. */
function assignWithin(items: readonly Item[], costs: ByLane, bound: number) {
	const loads = costs.map(() => 0);
	const lanes = costs.map((own) => own.map(() => 0));
	for (const { home, place, cost } of items) {
		const lane = loads[home]! + cost <= bound ? home : loads.indexOf(Math.min(...loads));
		loads[lane]! += cost;
		lanes[home]![place] = lane;
	}
	return { lanes, most: Math.max(...loads) };
}
