/**
 * How long a step takes: each rank's passes and update from its tallies and a machine's rates, then all ranks side by side,
 * each with the list of actions that it would execute; sums over the world hold them together.
 */
import {
	type Action,
	type Actor,
	type Chunk,
	isWork,
	type ScheduleShape,
	type Way,
	type Work,
} from "../schedule/actions.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { simulate } from "../schedule/simulate.ts";
import type { Transfer } from "./imagined-group.ts";
import type { PhaseTally, RankPlan } from "./rank-plan.ts";
import { type Rates, secondsOf, transferSeconds } from "./rates.ts";

/** Of one rank, in seconds. */
export interface RankSeconds {
	/** One microbatch's passes, collectives inside layers included; late weight gradients count as backward. */
	readonly forward: number;
	readonly backward: number;
	/** One microbatch over edges, there and back. */
	readonly bridge: number;
	/** Sums over replicas and the gathering of parameters. */
	readonly gradients: number;
	/** Zeroing gradients, norm, clipping, update. */
	readonly optimizer: number;
}

export interface ModuleEstimate extends RankSeconds {
	readonly module: RankPlan["module"];
	readonly ranks: number;
	/** Waiting for other ranks, a step. */
	readonly wait: number;
	/** Share of the step in which its ranks have nothing to do. */
	readonly idle: number;
}

export interface StepEstimate {
	readonly seconds: number;
	readonly modules: readonly ModuleEstimate[];
	/** Cores, not the schedule, decide: there are fewer than ranks would use. */
	readonly limitedByCores: boolean;
}

/** Ranks that do the same. */
export interface PlannedActor {
	readonly actor: Actor;
	readonly plan: RankPlan;
	readonly ranks: number;
}

const isBridge = ({ group }: Transfer) => group.startsWith("edge.");
const sumsReplicas = ({ group }: Transfer) => /\.(dp|expt_dp)$/.test(group);

function sum(values: Iterable<number>): number {
	let total = 0;
	for (const value of values) total += value;
	return total;
}

function tallySeconds({ operations, transfers }: PhaseTally, rates: Rates, ranksPerHost: number): number {
	const busy = sum(operations.map((one) => secondsOf(one, rates)));
	return busy + sum(transfers.map((one) => transferSeconds(one, rates, ranksPerHost)));
}

/** `ranksPerHost`: hosts hold consecutive ranks. */
export function rankSeconds({ phases, work }: RankPlan, rates: Rates, ranksPerHost: number): RankSeconds {
	const operations = (phase: keyof typeof phases) => sum(phases[phase].operations.map((one) => secondsOf(one, rates)));
	const transfers = (phase: keyof typeof phases, wanted: (one: Transfer) => boolean) =>
		sum(phases[phase].transfers.filter(wanted).map((one) => transferSeconds(one, rates, ranksPerHost)));
	const working = (kind: Work["kind"]) =>
		sum(Object.values(work).map((own) => tallySeconds(own[kind], rates, ranksPerHost)));
	return {
		forward: working("forward"),
		backward: working("backward") + working("weight gradient"),
		bridge: transfers("forward", isBridge) + transfers("backward", isBridge),
		gradients: transfers("update", sumsReplicas),
		optimizer: operations("prepare") + operations("update") + transfers("update", (one) => !sumsReplicas(one)),
	};
}

export function estimateStep(
	planned: readonly PlannedActor[],
	options: { readonly rates: Rates; readonly ranksPerHost: number; readonly shape: ScheduleShape },
): StepEstimate {
	const { rates, ranksPerHost, shape } = options;
	const { microbatches } = shape;
	const all = planned.map((one) => ({ ...one, seconds: rankSeconds(one.plan, rates, ranksPerHost) }));
	const passes = passSeconds(planned, options);
	const scheduled = passes + Math.max(...all.map(({ seconds }) => seconds.gradients + seconds.optimizer));
	const busyOf = ({ forward, backward, gradients, optimizer }: RankSeconds) =>
		microbatches * (forward + backward) + gradients + optimizer;
	// Ranks on one processor cannot do more work at once than it has cores.
	const work = sum(all.map(({ seconds, ranks }) => ranks * busyOf(seconds))) * rates.threads;
	const atLeast = rates.cores === null ? 0 : work / rates.cores;
	const seconds = Math.max(scheduled, atLeast);
	return {
		seconds,
		limitedByCores: atLeast > scheduled,
		modules: all.map(({ plan, ranks, seconds: own }) => ({
			...own,
			module: plan.module,
			ranks,
			wait: Math.max(0, passes - microbatches * (own.forward + own.backward)),
			idle: 1 - busyOf(own) / seconds,
		})),
	};
}

/** Until all ranks have passed all microbatches. */
function passSeconds(
	planned: readonly PlannedActor[],
	{ rates, ranksPerHost, shape }: Parameters<typeof estimateStep>[1],
): number {
	const chunksOf = (module: Chunk["module"]) => (module === "encoder" ? 1 : shape.virtualStages);
	const plans = new Map(planned.map(({ actor, plan }) => [actor, plan]));
	const seconds = memoized(
		(actor: Actor, module: Chunk["module"], kind: Work["kind"]) =>
			tallySeconds(plans.get(actor)!.work[module][kind], rates, ranksPerHost) / chunksOf(module),
	);
	/** One message over an edge takes as long as at its slowest end. */
	const transfer = memoized((edge: string, way: Way) => {
		const group = `edge.${edge}.${way}`;
		const ofRank = ({ phases }: RankPlan, kind: Transfer["kind"]) =>
			sum(
				phases[way].transfers
					.filter((one) => one.group === group && one.kind === kind)
					.map((one) => transferSeconds(one, rates, ranksPerHost)),
			);
		const messages = edge === "image_rows" ? 1 : shape.virtualStages;
		return Math.max(...planned.flatMap(({ plan }) => [ofRank(plan, "send"), ofRank(plan, "receive")])) / messages;
	});
	const lists = planned.map(({ actor }) => ({ actor, actions: actionsOf(shape, actor) }));
	const durations = {
		of: (action: Action, actor: Actor) => (isWork(action) ? seconds(actor, action.chunk.module, action.kind) : 0),
		transfer: (action: Action) =>
			"way" in action ? transfer(action.to.index === 0 ? "image_rows" : "hidden_states", action.way) : 0,
	};
	return simulate(lists, durations).end;
}

/** The same function, which computes the result of equal arguments once. */
function memoized<Arguments extends readonly (string | number)[]>(
	compute: (...given: Arguments) => number,
): (...given: Arguments) => number {
	const known = new Map<string, number>();
	return (...given) => {
		const key = given.join(" ");
		const value = known.get(key) ?? compute(...given);
		known.set(key, value);
		return value;
	};
}
