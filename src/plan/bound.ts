/** The bound of a step's time: the busiest ranks' largest cost, or too little memory. */
import { type PlannedActor, type StepConditions, type StepEstimate, timeOf } from "./estimate.ts";

/** "pipeline": its stages wait for each other. */
export type Limit =
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
