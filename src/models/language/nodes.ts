/** A computation in schedule nodes: it yields where another microbatch's node may run. */

export type Nodes<Result> = Generator<void, Result, void>;

/** Runs all nodes in order, as a plain function would. */
export function exhaust<Result>(nodes: Nodes<Result>): Result {
	for (;;) {
		const { done, value } = nodes.next();
		if (done) return value;
	}
}
