/**
 * Loaded into every rank of meeting.test.ts: members of a group wait for each other at its first collective, as NCCL's do
 * when they make their communicator, and sums are not made in the order of the ranks. Groups met are written to a file.
 */
import { appendFileSync } from "node:fs";
import { RunGroup } from "../../src/parallel/run-group.ts";
import { World } from "../../src/parallel/world.ts";

const met = new WeakSet<RunGroup>();
for (const name of ["allReduce", "reduceScatter", "allGather", "broadcast", "allToAll"] as const) {
	const plain = RunGroup.prototype[name] as (...args: unknown[]) => unknown;
	const meeting = function (this: RunGroup, ...args: unknown[]): unknown {
		if (!met.has(this)) {
			met.add(this);
			this.barrier();
			appendFileSync(process.env.MIMO_TEST_MET!, `${this.name}\n`);
		}
		return plain.apply(this, args);
	};
	Object.assign(RunGroup.prototype, { [name]: meeting });
}

const { join } = World;
Object.assign(World, {
	join: (...args: Parameters<typeof join>) => Object.assign(join.apply(World, args), { addsInRankOrder: false }),
});
