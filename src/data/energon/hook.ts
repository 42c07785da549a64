/**
 * Functions of a task encoder, with what Energon's decorators say about them (docs/spec/energon.md §5.1, §5.3).
 */
import type { SystemRandom } from "./random/system-random.ts";
import type { Worker } from "./worker.ts";

/** Questions that a function may ask while it runs. */
export interface HookContext {
	/** Number of this call, unique over the rank's workers. */
	readonly sampleIndex: number;
	/** Number of the output being made, unique over the rank's workers. */
	readonly batchIndex: number;
	/** Generators to draw from: the worker's stream, or one of this call alone with `restoreSeeds`. */
	readonly random: SystemRandom;
}

export interface Hook<In, Out> {
	/** Says in messages which step it is. */
	readonly name: string;
	/** Same input, same output: samples behind it can be restored by key. */
	readonly stateless: boolean;
	/** Draws come from a seed of worker and call number, and leave the worker's stream alone. */
	readonly restoreSeeds: boolean;
	/** Failures in a row that end the run; 0 = any number. */
	readonly tolerance: number;
	readonly run: (input: In, context: HookContext) => Out;
}

export const DEFAULT_TOLERANCE = 100;

type Flags = Partial<Pick<Hook<never, never>, "stateless" | "restoreSeeds" | "tolerance">>;

/** A hook that is stateless unless said otherwise. */
export function hook<In, Out>(
	name: string,
	run: (input: In, context: HookContext) => Out,
	flags: Flags = {},
): Hook<In, Out> {
	return { name, run, stateless: true, restoreSeeds: false, tolerance: DEFAULT_TOLERANCE, ...flags };
}

/** Runs `body` with generators seeded for this call; puts the worker's stream back afterwards. */
function seeded<Result>(worker: Worker, owner: Pick<Hook<never, never>, "restoreSeeds">, body: () => Result): Result {
	if (!owner.restoreSeeds) return body();
	const outer = worker.random.state();
	worker.random.seed(worker.callSeed(owner));
	try {
		return body();
	} finally {
		worker.random.restore(outer);
	}
}

/** Call number `call` of a hook. */
export function runHook<In, Out>(worker: Worker, owner: Hook<In, Out>, call: number, input: In): Out {
	return worker.duringCall(call, () => seeded(worker, owner, () => owner.run(input, worker)));
}
