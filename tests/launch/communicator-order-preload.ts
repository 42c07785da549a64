/**
 * Loaded into every rank of communicator-order.test.ts. As at the creation of NCCL's communicators, members of a group wait for each
 * other at its first collective, a pair at the first message of a direction, and each member for its calls under way; sums are not
 * in the order of ranks. The names of these groups and pairs are written to a file.
 */
import { appendFileSync, existsSync, writeFileSync } from "node:fs";
import type { Pending } from "../../src/parallel/group.ts";
import { RunGroup } from "../../src/parallel/run-group.ts";
import { World } from "../../src/parallel/world.ts";
import type { Tensor } from "../../src/tensor/tensor.ts";

const file = process.env.MIMO_TEST_MET!;
const met = new WeakSet<RunGroup>();
const underWay: Pending[] = [];
const settle = () => {
	for (const call of underWay.splice(0)) call.wait();
};
for (const name of ["allReduce", "reduceScatter", "allGather", "broadcast", "allToAll"] as const) {
	const plain = RunGroup.prototype[name] as (...args: unknown[]) => Pending;
	const meeting = function (this: RunGroup, ...args: unknown[]): unknown {
		if (!met.has(this)) {
			met.add(this);
			settle();
			this.barrier();
			appendFileSync(file, `${this.name}\n`);
		}
		const pending = plain.apply(this, args);
		underWay.push(pending);
		return pending;
	};
	Object.assign(RunGroup.prototype, { [name]: meeting });
}

const pairs = new Set<string>();
for (const name of ["send", "receive"] as const) {
	const plain = RunGroup.prototype[name] as (x: Tensor, peer: number) => Pending;
	const meeting = function (this: RunGroup, x: Tensor, peer: number): Pending {
		const pair = `${this.name}.${(name === "send" ? [this.rank, peer] : [peer, this.rank]).join("-")}`;
		if (!pairs.has(pair)) {
			pairs.add(pair);
			settle();
			writeFileSync(`${file}.${pair}.${this.rank}`, "");
			while (!existsSync(`${file}.${pair}.${peer}`)) Bun.sleepSync(1);
			appendFileSync(file, `${pair}\n`);
		}
		const pending = plain.call(this, x, peer);
		underWay.push(pending);
		return pending;
	};
	Object.assign(RunGroup.prototype, { [name]: meeting });
}

const { join } = World;
Object.assign(World, {
	join: (...args: Parameters<typeof join>) =>
		Object.defineProperty(join.apply(World, args), "addsInRankOrder", { value: false }),
});
