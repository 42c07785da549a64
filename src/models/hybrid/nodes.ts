/** Computation in nodes: it yields where another microbatch may take its turn. */

export type Nodes<Result> = Generator<void, Result, void>;

/** Runs all nodes one after the other: what a function would do. */
export function exhaust<Result>(nodes: Nodes<Result>): Result {
	for (;;) {
		const { done, value } = nodes.next();
		if (done) return value;
	}
}
