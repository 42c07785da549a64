/**
 * How long a step takes: each rank's passes and update from its tallies and a machine's rates, then both modules side by
 * side as the schedule orders them (runtime.md §3.2): the encoder is some microbatches ahead and waits for gradients, the
 * language model waits for rows; sums over the world hold both together.
 */
import { microbatchesAhead } from "../parallel/bridge.ts";
import type { Transfer } from "./imagined-group.ts";
import type { RankPlan } from "./rank-plan.ts";
import { type Rates, secondsOf, transferSeconds } from "./rates.ts";

/** Of one rank, in seconds. */
export interface RankSeconds {
	/** One microbatch's passes, collectives inside layers included. */
	readonly forward: number;
	readonly backward: number;
	/** One microbatch over the bridge, there and back. */
	readonly bridge: number;
	/** Sums over replicas and the gathering of parameters. */
	readonly gradients: number;
	/** Zeroing gradients, norm, clipping, update. */
	readonly optimizer: number;
}

export interface ModuleEstimate extends RankSeconds {
	readonly module: RankPlan["module"];
	readonly ranks: number;
	/** Waiting for the other module, a step. */
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

export interface PlannedModule {
	readonly plan: RankPlan;
	readonly ranks: number;
}

const isBridge = ({ group }: Transfer) => group === "bridge";
const sumsReplicas = ({ group }: Transfer) => /\.(dp|expt_dp)$/.test(group);

function sum(values: Iterable<number>): number {
	let total = 0;
	for (const value of values) total += value;
	return total;
}

/** `ranksPerHost`: hosts hold consecutive ranks. */
export function rankSeconds({ phases }: RankPlan, rates: Rates, ranksPerHost: number): RankSeconds {
	const operations = (phase: keyof typeof phases) => sum(phases[phase].operations.map((one) => secondsOf(one, rates)));
	const transfers = (phase: keyof typeof phases, wanted: (one: Transfer) => boolean) =>
		sum(phases[phase].transfers.filter(wanted).map((one) => transferSeconds(one, rates, ranksPerHost)));
	const inLayers = (one: Transfer) => !isBridge(one);
	return {
		forward: operations("forward") + transfers("forward", inLayers),
		backward: operations("backward") + transfers("backward", inLayers),
		bridge: transfers("forward", isBridge) + transfers("backward", isBridge),
		gradients: transfers("update", sumsReplicas),
		optimizer: operations("prepare") + operations("update") + transfers("update", (one) => !sumsReplicas(one)),
	};
}

/** `microbatches`: of a step of one lane. */
export function estimateStep(
	planned: readonly PlannedModule[],
	options: { readonly rates: Rates; readonly ranksPerHost: number; readonly microbatches: number },
): StepEstimate {
	const { rates, ranksPerHost, microbatches } = options;
	const all = planned.map((one) => ({ ...one, seconds: rankSeconds(one.plan, rates, ranksPerHost) }));
	const encoder = all.find(({ plan }) => plan.module === "radio_encoder")?.seconds;
	const language = all.find(({ plan }) => plan.module === "language")!.seconds;
	const passes = encoder
		? runPasses(encoder, language, microbatches)
		: microbatches * (language.forward + language.backward);
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

/** Until both modules have passed all microbatches: F0 F1 F2 ←0 B0 F3 ←1 B1 … against ←0 F0 B0 →0 ←1 F1 B1 →1 …. */
function runPasses(encoder: RankSeconds, language: RankSeconds, microbatches: number): number {
	const transfer = Math.max(encoder.bridge, language.bridge) / 2;
	let [encoderAt, languageAt] = [0, 0];
	const gradientAt: number[] = [];
	const backward = (index: number) => {
		encoderAt = Math.max(encoderAt, gradientAt[index]!) + encoder.backward;
	};
	for (let index = 0; index < microbatches; index++) {
		encoderAt += encoder.forward;
		languageAt = Math.max(languageAt, encoderAt + transfer) + language.forward + language.backward;
		gradientAt.push(languageAt + transfer);
		if (index >= microbatchesAhead) backward(index - microbatchesAhead);
	}
	for (let index = Math.max(0, microbatches - microbatchesAhead); index < microbatches; index++) backward(index);
	return Math.max(encoderAt, languageAt);
}
