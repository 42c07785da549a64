/** Functions of a task encoder, with what Energon's decorators say about them (docs/spec/energon.md §5.1). */

export interface Hook<In, Out> {
	/** Says in messages which step it is. */
	readonly name: string;
	/** Same input, same output: samples behind it can be restored by key. */
	readonly stateless: boolean;
	/** Failures in a row that end the run; 0 = any number. */
	readonly tolerance: number;
	readonly run: (input: In) => Out;
}

export const DEFAULT_TOLERANCE = 100;

type Flags = Partial<Pick<Hook<never, never>, "stateless" | "tolerance">>;

/** A hook that is stateless unless said otherwise. */
export function hook<In, Out>(name: string, run: (input: In) => Out, flags: Flags = {}): Hook<In, Out> {
	return { name, run, stateless: true, tolerance: DEFAULT_TOLERANCE, ...flags };
}
