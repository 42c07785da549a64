/**
 * Functions of a task encoder, with what Energon's decorators say about them (docs/spec/energon.md §5.1, §5.3).
 */
import type { SystemRandom, SystemRandomState } from "./random/system-random.ts";
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

interface HookBase {
	/** Says in messages which step it is. */
	readonly name: string;
	/** Same input, same output: samples behind it can be restored by key. */
	readonly stateless: boolean;
	/** Draws come from a seed of worker and call number, and leave the worker's stream alone. */
	readonly restoreSeeds: boolean;
	/** Failures in a row that end the run; 0 = any number. */
	readonly tolerance: number;
}

export interface FunctionHook<In, Out> extends HookBase {
	readonly kind: "function";
	readonly run: (input: In, context: HookContext) => Out;
}

export interface GeneratorHook<In, Out> extends HookBase {
	readonly kind: "generator";
	readonly run: (input: In, context: HookContext) => Generator<Out, void, void>;
}

export type Hook<In, Out> = FunctionHook<In, Out> | GeneratorHook<In, Out>;

export const DEFAULT_TOLERANCE = 100;

type Flags = Partial<Pick<HookBase, "stateless" | "restoreSeeds" | "tolerance">>;

/** A hook of one output per input; stateless unless said otherwise. */
export function hook<In, Out>(
	name: string,
	run: (input: In, context: HookContext) => Out,
	flags: Flags = {},
): FunctionHook<In, Out> {
	return { kind: "function", name, run, stateless: true, restoreSeeds: false, tolerance: DEFAULT_TOLERANCE, ...flags };
}

/** A hook of any number of outputs per input; stateless unless said otherwise. */
export function generatorHook<In, Out>(
	name: string,
	run: (input: In, context: HookContext) => Generator<Out, void, void>,
	flags: Flags = {},
): GeneratorHook<In, Out> {
	return { kind: "generator", name, run, stateless: true, restoreSeeds: false, tolerance: DEFAULT_TOLERANCE, ...flags };
}

/** Runs `body` with generators seeded for this call; puts the worker's stream back afterwards. */
function seeded<Result>(worker: Worker, owner: HookBase, body: () => Result): Result {
	if (!owner.restoreSeeds) return body();
	const outer = worker.random.state();
	worker.random.seed(worker.callSeed(owner));
	try {
		return body();
	} finally {
		worker.random.restore(outer);
	}
}

/** Call number `call` of a function hook. */
export function runHook<In, Out>(worker: Worker, owner: Hook<In, Out>, call: number, input: In): Out {
	if (owner.kind !== "function") throw new Error(`${owner.name} makes several outputs.`);
	return worker.duringCall(call, () => seeded(worker, owner, () => owner.run(input, worker)));
}

/** Outputs of call number `call` of a generator hook. With restored seeds each step draws on from its own stream. */
runHook.generator = function* <In, Out>(
	worker: Worker,
	owner: Hook<In, Out>,
	call: number,
	input: In,
): Generator<Out, void, void> {
	if (owner.kind !== "generator") throw new Error(`${owner.name} makes one output.`);
	const outputs = worker.duringCall(call, () => owner.run(input, worker));
	let inner: SystemRandomState | null = null;
	for (;;) {
		const outer = owner.restoreSeeds ? worker.random.state() : null;
		let step: IteratorResult<Out, void>;
		try {
			step = worker.duringCall(call, () => {
				if (outer !== null) {
					if (inner === null) worker.random.seed(worker.callSeed(owner));
					else worker.random.restore(inner);
				}
				return outputs.next();
			});
			if (outer !== null) inner = worker.random.state();
		} finally {
			if (outer !== null) worker.random.restore(outer);
		}
		if (step.done) return;
		yield step.value;
	}
};
