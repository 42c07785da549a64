/** Runs a comparison again with near ties of its routing decided the other way, where that makes a failed step agree. */

import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/group.ts";
import { Tensor } from "../tensor/tensor.ts";
import { firstFailure, type ParityReport } from "./comparison.ts";
import { describeTie, type NearTie, NearTies } from "./near-ties.ts";

/** Every rank's values, in rank order; each gives equally many. */
export type Gather = (own: Float64Array) => Float64Array;

/** Runs at most this often: near ties are rare, and each run is a whole training. */
const mostRuns = 16;
/** Near ties of a rank that are looked at, the closest first. */
const mostTies = 32;

/** `run` compares the first `steps` steps (undefined: all). Every rank of the world calls this together. */
export async function resolveTies(
	rank: number,
	gather: Gather,
	run: (ties: NearTies, steps?: number) => Promise<ParityReport>,
): Promise<ParityReport> {
	const swapped: NearTie[] = [];
	let ties = new NearTies(rank, swapped);
	let report = await run(ties);
	let runs = 1;
	for (;;) {
		const failed = failedStep(report, gather);
		if (failed === Number.POSITIVE_INFINITY) break;
		const candidates = closest(gatherTies(ties.found, gather), failed);
		let accepted = false;
		for (const tie of candidates) {
			if (++runs > mostRuns) break;
			const attempt = new NearTies(rank, [...swapped, tie]);
			if (failedStep(await run(attempt, failed + 1), gather) === Number.POSITIVE_INFINITY) {
				swapped.push(tie);
				accepted = true;
				break;
			}
		}
		if (!accepted) break;
		ties = new NearTies(rank, swapped);
		report = await run(ties);
	}
	return swapped.length === 0 ? report : { ...report, ties: swapped.map(describeTie) };
}

/** All values side by side through the group's sum. */
export function gatherOver(group: Group, device: Device, rank: number, ranks: number): Gather {
	return (own) => {
		const all = new Float64Array(ranks * own.length);
		all.set(own, rank * own.length);
		using sums = Tensor.from(device, all);
		group.allReduce(sums).wait();
		device.copyToHost(all, sums);
		return all;
	};
}

/** The first step, from 0, of which any rank says that it is off. */
function failedStep(report: ParityReport, gather: Gather): number {
	const step = /^step (\d+)/.exec(firstFailure(report)?.name ?? "")?.[1];
	const own = step === undefined ? -1 : Number(step) - 1;
	const failures = gather(Float64Array.of(own)).filter((value) => value >= 0);
	return failures.length === 0 ? Number.POSITIVE_INFINITY : Math.min(...failures);
}

const fields = ["rank", "step", "layer", "pass", "token", "chosen", "leftOut", "gap"] as const;

function gatherTies(own: readonly NearTie[], gather: Gather): NearTie[] {
	const packed = new Float64Array(mostTies * fields.length).fill(-1);
	for (const [index, tie] of own
		.toSorted((a, b) => a.gap - b.gap)
		.slice(0, mostTies)
		.entries()) {
		packed.set(
			fields.map((field) => tie[field]),
			index * fields.length,
		);
	}
	const all = gather(packed);
	return Array.from({ length: all.length / fields.length }, (_, index) => {
		const values = all.subarray(index * fields.length, (index + 1) * fields.length);
		return Object.fromEntries(fields.map((field, at) => [field, values[at]!])) as unknown as NearTie;
	}).filter(({ rank }) => rank >= 0);
}

/** Those that can explain a first difference in this step: its own first, then earlier ones that grew. */
function closest(ties: readonly NearTie[], step: number): NearTie[] {
	return ties.filter((tie) => tie.step <= step).sort((a, b) => b.step - a.step || a.gap - b.gap);
}
