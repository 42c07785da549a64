/**
 * Estimates the time of a step: each rank's passes and update from its tallies and the machine's rates, then all ranks side by
 * side executing their lists of actions, with one synchronisation a step.
 */
import {
	type Actor,
	type ChunkEdge,
	chunkName,
	type Direction,
	isWork,
	type ScheduleShape,
	type Work,
} from "../schedule/actions.ts";
import { lastNode } from "../schedule/combined.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { type Durations, simulate } from "../schedule/simulate.ts";
import { type PhaseTally, type RankPlan, sumsReplicas, type TransferTally } from "./rank-plan.ts";
import { type Rates, secondsOf, spansHosts, transferSeconds } from "./rates.ts";
import type { Transfer } from "./simulated-group.ts";

/** Of one rank, in seconds. */
export interface RankSeconds {
	/** One microbatch's passes, collectives inside layers included; late weight gradients count as backward. */
	readonly forward: number;
	readonly backward: number;
	/** Transfers of one microbatch over edges, both directions. */
	readonly bridge: number;
	/** Sums over replicas that no backward pass hides, and the gathering of parameters. */
	readonly gradients: number;
	/** Zeroing gradients, norm, clipping, update. */
	readonly optimizer: number;
	/** The part of `gradients` and `optimizer` before all ranks agree on the gradient's norm. */
	readonly reduce: number;
	/** The part of `gradients` and `optimizer` after all ranks agree on the gradient's norm, up to the next step's first pass. */
	readonly update: number;
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
	/** Whether cores, not the schedule, bound the step: there are fewer than the ranks would use. */
	readonly limitedByCores: boolean;
}

/** Ranks with the same work. */
export interface PlannedActor {
	readonly actor: Actor;
	readonly plan: RankPlan;
	readonly ranks: number;
}

/** Conditions of a step's time besides its ranks' work. */
export interface StepConditions {
	readonly rates: Rates;
	/** Number of consecutive ranks on each host. */
	readonly ranksPerHost: number;
	readonly shape: ScheduleShape;
	/** Name of the group of actors whose ranks cut a module between them and so run its passes together; null: no such group. */
	readonly together: (module: string, actor: Actor) => string | null;
}

/** Whether a transfer crosses an edge between modules or stages. */
const crossesEdge = ({ group }: Transfer) => group.startsWith("edge.");

function sum(values: Iterable<number>): number {
	let total = 0;
	for (const value of values) total += value;
	return total;
}

function tallySeconds({ operations, transfers }: PhaseTally, rates: Rates, ranksPerHost: number): number {
	const busy = sum(operations.map((one) => secondsOf(one, rates)));
	return busy + sum(transfers.map((one) => one.calls * transferSeconds(one, rates, ranksPerHost)));
}

/** `ranksPerHost`: hosts hold consecutive ranks. */
export function rankSeconds(plan: RankPlan, rates: Rates, ranksPerHost: number): RankSeconds {
	const { phases, work, overlapped } = plan;
	const transfers = (some: readonly TransferTally[]) =>
		sum(some.map((one) => one.calls * transferSeconds(one, rates, ranksPerHost)));
	const whole = (tally: PhaseTally) => tallySeconds(tally, rates, ranksPerHost);
	const working = (kind: Work["kind"]) => sum(work.values().map((own) => whole(own[kind])));
	const overEdges = (direction: Direction) => transfers(phases[direction].transfers.filter(crossesEdge));
	const [forward, backward] = [working("forward"), working("backward") + working("weight gradient")];
	// On a processor sums over replicas are not hidden: its cores are busy with the passes.
	const hidden = rates.cores === null ? backward : 0;
	const exposed = Math.max(0, transfers(overlapped) - hidden);
	const ends = [phases.reduce, phases.update].flatMap((tally) => tally.transfers);
	const reduce = whole(phases.reduce) + exposed;
	const update = whole(phases.prepare) + whole(phases.update);
	const gradients = transfers(ends.filter(sumsReplicas)) + exposed;
	return {
		forward,
		backward,
		bridge: overEdges("forward") + overEdges("backward"),
		gradients,
		optimizer: reduce + update - gradients,
		reduce,
		update,
	};
}

/** Where one of an actor's ranks spends a step, in seconds. */
export interface TimeSpent {
	readonly computation: number;
	/** Transfers that no computation hides. */
	readonly inHost: number;
	readonly betweenHosts: number;
	/** Of the computation, the encoders'. */
	readonly encoder: number;
}

function timeOf({ plan }: PlannedActor, { rates, ranksPerHost, shape }: StepConditions): TimeSpent {
	const { phases, overlapped, work } = plan;
	const { microbatches } = shape;
	const passes = [phases.forward, phases.backward, phases["weight gradient"]];
	const ends = [phases.prepare, phases.reduce, phases.update];
	const busy = (tallies: readonly PhaseTally[]) =>
		sum(tallies.flatMap(({ operations }) => operations.map((one) => secondsOf(one, rates))));
	const spread = (transfers: readonly TransferTally[], hosts: boolean) =>
		sum(
			transfers
				.filter(({ ranks }) => spansHosts(ranks, ranksPerHost) === hosts)
				.map((one) => one.calls * transferSeconds(one, rates, ranksPerHost)),
		);
	const late = spread(overlapped, true) + spread(overlapped, false);
	const { gradients } = rankSeconds(plan, rates, ranksPerHost);
	const atTheEnd = ends.flatMap(({ transfers }) => transfers);
	const exposed =
		gradients - sum(atTheEnd.filter(sumsReplicas).map((one) => one.calls * transferSeconds(one, rates, ranksPerHost)));
	const transfersOf = (hosts: boolean) =>
		microbatches *
			spread(
				passes.flatMap(({ transfers }) => transfers).filter((one) => !crossesEdge(one)),
				hosts,
			) +
		spread(atTheEnd, hosts) +
		(late > 0 ? (exposed * spread(overlapped, hosts)) / late : 0);
	const encoder = work.entries().filter(([chunk]) => !chunk.startsWith(`${shape.pipeline}.`));
	return {
		computation: microbatches * busy(passes) + busy(ends),
		inHost: transfersOf(false),
		betweenHosts: transfersOf(true),
		encoder: microbatches * sum(encoder.map(([, own]) => busy(Object.values(own)))),
	};
}

/**
 * From one agreement on the gradient's norm to the next: every rank's update, its passes as soon as what they need has
 * come, and what is left before the next agreement. So a module that updates longer begins its next passes later than
 * another, and neither waits for the other's update.
 */
export function estimateStep(planned: readonly PlannedActor[], conditions: StepConditions): StepEstimate {
	const { rates, ranksPerHost, shape } = conditions;
	const all = planned.map((one) => ({ ...one, seconds: rankSeconds(one.plan, rates, ranksPerHost) }));
	const busyOf = ({ forward, backward, gradients, optimizer }: RankSeconds) =>
		shape.microbatches * (forward + backward) + gradients + optimizer;
	const durations = durationsOf(all, conditions);
	const ends = (cores: Durations["cores"] | null) => {
		const { timelines } = simulate(
			all.map(({ actor }) => ({ actor, actions: actionsOf(shape, actor) })),
			cores ? { ...durations, cores } : durations,
		);
		return Math.max(...timelines.map(({ actions }, index) => actions.at(-1)!.end + all[index]!.seconds.reduce));
	};
	const scheduled = ends(null);
	// Ranks on one processor cannot do more work at once than it has cores.
	const users = new Map(all.map(({ actor, ranks }) => [actor, ranks * rates.threads]));
	const work = sum(all.map(({ actor, seconds }) => users.get(actor)! * busyOf(seconds)));
	const shared = rates.cores;
	const seconds =
		shared === null ? scheduled : Math.max(ends({ shared, of: (actor) => users.get(actor)! }), work / shared);
	return {
		seconds,
		limitedByCores: seconds > scheduled,
		modules: all.map(({ plan, ranks, seconds: own }) => ({
			...own,
			module: plan.module,
			ranks,
			wait: Math.max(0, seconds - busyOf(own)),
			idle: Math.max(0, 1 - busyOf(own) / seconds),
		})),
	};
}

/** A node of a pass counts as an equal share of it: tallies are of whole passes. */
function durationsOf(
	planned: readonly (PlannedActor & { readonly seconds: RankSeconds })[],
	{ rates, ranksPerHost, shape, together }: StepConditions,
): Durations {
	const byActor = new Map(planned.map((one) => [one.actor, one]));
	const seconds = memoized((actor: Actor, chunk: string, kind: Work["kind"]) =>
		tallySeconds(byActor.get(actor)!.plan.work.get(chunk)![kind], rates, ranksPerHost),
	);
	const shareOf = ({ node, chunk }: Work) => (node === undefined ? 1 : 1 / (lastNode(shape.overlap!, chunk.index) + 1));
	/** One message over an edge takes as long as at its slowest end. */
	const transfer = memoized((edge: string, direction: Direction) => {
		const group = `edge.${edge}.${direction}`;
		const ofRank = ({ phases }: RankPlan, kind: Transfer["kind"]) =>
			sum(
				phases[direction].transfers
					.filter((one) => one.group === group && one.kind === kind)
					.map((one) => transferSeconds(one, rates, ranksPerHost)),
			);
		const messages = edge === shape.pipeline ? shape.virtualStages : 1;
		return Math.max(...planned.flatMap(({ plan }) => [ofRank(plan, "send"), ofRank(plan, "receive")])) / messages;
	});
	return {
		of: (action, actor) =>
			isWork(action) ? shareOf(action) * seconds(actor, chunkName(action.chunk), action.kind) : 0,
		transfer: (action) => ("direction" in action ? transfer(edgeName(action, shape), action.direction) : 0),
		together: (action, actor) => (isWork(action) ? together(action.chunk.module, actor) : null),
		begin: (actor) => byActor.get(actor)!.seconds.update,
	};
}

/** The name of an edge in that of its groups. */
function edgeName({ from, to }: ChunkEdge, { pipeline }: ScheduleShape): string {
	return from.module === to.module && from.module !== pipeline ? `${from.module}.stages` : from.module;
}

/** `compute`, which computes the result of equal arguments once. */
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

// The bound of a step's time: the busiest ranks' largest cost, or too little memory.

/** "pipeline": its stages wait for each other. */
type Limit =
	| "memory"
	| "encoder"
	| "computation"
	| "exchange between hosts"
	| "exchange in a host"
	| "pipeline"
	| "cores";

export interface StepBound {
	readonly limit: Limit;
	/** Index of the actor that holds the step up, or that needs most memory. */
	readonly actor: number;
	/** Of that actor's step, shares of its time. */
	readonly computation: number;
	readonly inHost: number;
	readonly betweenHosts: number;
	readonly waiting: number;
	/** Of its operations, the encoder's. */
	readonly encoder: number;
}

/** `memoryBytes` of a device; null: not limited. */
export function boundOf(
	planned: readonly PlannedActor[],
	step: StepEstimate,
	conditions: StepConditions,
	memoryBytes: number | null,
): StepBound {
	const largest = planned.reduce(
		(most, { plan }, index) => (peak(planned[most]!) < plan.memory.peak ? index : most),
		0,
	);
	const busiest = step.modules.reduce(
		(least, { idle }, index) => (step.modules[least]!.idle > idle ? index : least),
		0,
	);
	const tooLarge = memoryBytes !== null && peak(planned[largest]!) > memoryBytes;
	const actor = tooLarge ? largest : busiest;
	const { computation, inHost, betweenHosts, encoder } = timeOf(planned[actor]!, conditions);
	const { seconds } = step;
	const shares = {
		computation: computation / seconds,
		inHost: inHost / seconds,
		betweenHosts: betweenHosts / seconds,
		waiting: step.modules[actor]!.idle,
	};
	const encoderShare = computation > 0 ? encoder / computation : 0;
	const limit = (): Limit => {
		if (tooLarge) return "memory";
		if (step.limitedByCores) return "cores";
		const [[name]] = Object.entries(shares).toSorted(([, a], [, b]) => b - a) as [[keyof typeof shares, number]];
		if (name === "inHost") return "exchange in a host";
		if (name === "betweenHosts") return "exchange between hosts";
		if (name === "waiting") return "pipeline";
		return encoderShare > 0.5 ? "encoder" : "computation";
	};
	return { limit: limit(), actor, ...shares, encoder: encoderShare };
}

const peak = ({ plan }: PlannedActor) => plan.memory.peak;
