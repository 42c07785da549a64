/**
 * Loaded into every rank of meeting.test.ts: members of a group wait for each other at its first collective, and each of
 * them for the calls that it has under way, as NCCL's do when they make their communicator; and sums are not made in the
 * order of the ranks. Groups met are written to a file.
 */
import { appendFileSync } from "node:fs";
import type { Pending } from "../../src/parallel/group.ts";
import { RunGroup } from "../../src/parallel/run-group.ts";
import { World } from "../../src/parallel/world.ts";

const met = new WeakSet<RunGroup>();
const underWay: Pending[] = [];
for (const name of ["allReduce", "reduceScatter", "allGather", "broadcast", "allToAll"] as const) {
	const plain = RunGroup.prototype[name] as (...args: unknown[]) => Pending;
	const meeting = function (this: RunGroup, ...args: unknown[]): unknown {
		if (!met.has(this)) {
			met.add(this);
			for (const call of underWay.splice(0)) call.wait();
			this.barrier();
			appendFileSync(process.env.MIMO_TEST_MET!, `${this.name}\n`);
		}
		const pending = plain.apply(this, args);
		underWay.push(pending);
		return pending;
	};
	Object.assign(RunGroup.prototype, { [name]: meeting });
}

const { join } = World;
Object.assign(World, {
	join: (...args: Parameters<typeof join>) => Object.assign(join.apply(World, args), { addsInRankOrder: false }),
});
