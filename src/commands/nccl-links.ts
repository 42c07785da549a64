/** Measures the NCCL bandwidth between the nodes of a job: each pair in both directions, between their first GPUs. */

import { pairsInRounds } from "../launch/bandwidth.ts";
import { identityOf, joinRun } from "../launch/join.ts";
import type { Place } from "../launch/place.ts";
import type { Device } from "../native/device.ts";
import { openDevice } from "../native/open-device.ts";
import type { Run } from "../native/run.ts";
import { RunGroup, World } from "../parallel/index.ts";
import { messageOf } from "../system/errors.ts";
import { programVersion } from "../system/program-version.ts";
import { Tensor } from "../tensor/index.ts";
import type { Finding } from "./machine.ts";

/** Rank 0's request to a node: to measure as node number `node` of `nodes`. */
export interface NcclQuestion {
	readonly nccl: { readonly node: number; readonly nodes: number };
}

/** Bytes a second from one node to another, which are given by number. */
export interface NcclRate {
	readonly from: number;
	readonly to: number;
	readonly rate: number;
}

/** fp32 elements of a message, and how often it is sent; the first time includes connecting. */
const message = { elements: 2 ** 25, times: 5 };
const timeoutMinutes = 2;

/** Whether a node with these findings can take part. */
export function hasNccl(findings: readonly Finding[]): boolean {
	const good = (name: string) => findings.some((finding) => finding.name === name && finding.state === "good");
	return good("cuda device") && good("NCCL");
}

/** Measures this node's pairs with all other nodes. Resolves with the rates of messages that this node received. */
export async function measureNcclRates(place: Place, { nccl: { node, nodes } }: NcclQuestion): Promise<NcclRate[]> {
	const own: Place = {
		...place,
		rank: node,
		worldSize: nodes,
		localRank: 0,
		localSize: 1,
		// At `place.port` rank 0 gathers the tasks' reports.
		port: place.port + 1,
	};
	using device = await openDevice("cuda", { threads: 1 });
	const { library } = device;
	const identity = identityOf(node, nodes, { library, version: programVersion(), configuration: {} });
	using run = await joinRun(own, identity, library, timeoutMinutes);
	run.describe(node, "doctor", `node ${node}`);
	try {
		using world = World.join(device, run, node);
		const rates: NcclRate[] = [];
		for (const round of pairsInRounds(nodes)) {
			const pair = round.find((both) => both.includes(node));
			if (pair) rates.push(...measurePair(device, run, node, pair));
			// Lets the event loop answer rank 0, which waits with a timeout.
			await Bun.sleep(0);
		}
		world.leave();
		return rates;
	} catch (error) {
		run.fail(node, messageOf(error));
		run.settle();
		throw error;
	}
}

function measurePair(device: Device, run: Run, node: number, pair: readonly [number, number]): NcclRate[] {
	using group = new RunGroup(run, device, node, "doctor.pair", pair);
	using tensor = Tensor.zeros(device, [message.elements]);
	const rates: NcclRate[] = [];
	const [a, b] = pair;
	for (const [from, to] of [
		[a, b],
		[b, a],
	] as const) {
		let best = Number.POSITIVE_INFINITY;
		for (let time = 0; time < message.times; time++) {
			group.barrier();
			const began = performance.now();
			if (node === from) group.send(tensor, pair.indexOf(to)).wait();
			else group.receive(tensor, pair.indexOf(from)).wait();
			device.synchronize();
			best = Math.min(best, performance.now() - began);
		}
		if (node === to) rates.push({ from, to, rate: (tensor.bytes / best) * 1000 });
	}
	return rates;
}
