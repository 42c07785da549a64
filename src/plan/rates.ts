/**
 * How fast a machine is: measured on it by `mimo plan --measure`, or guessed from what its vendor states. Products are
 * rated in operations a second, everything else in bytes a second.
 */
import * as v from "valibot";
import type { OperationName } from "../native/abi.ts";
import { UserError } from "../native/errors.ts";
import { exitCodes } from "../native/exit-codes.ts";
import type { Transfer } from "./imagined-group.ts";
import { isProduct } from "./operation-work.ts";
import type { OperationTally } from "./rank-plan.ts";

const point = v.strictObject({ amount: v.number(), seconds: v.number() });

export const ratesSchema = v.strictObject({
	/** Whose rates they are. */
	device: v.string(),
	/** Processor cores that the ranks of a host share; null: every rank has a device of its own. */
	cores: v.nullable(v.number()),
	/** Cores that one rank uses. */
	threads: v.number(),
	/** Seconds of one call by its amount, ascending, of every operation that was timed. */
	operations: v.record(v.string(), v.array(point)),
	/** Of an operation that was not timed. */
	product: v.number(),
	bytes: v.number(),
	/** Seconds of the host a call, beyond the operation's own. */
	call: v.number(),
	/** Bytes a second and seconds a transfer inside a host and between hosts. */
	inside: v.strictObject({ bytes: v.number(), latency: v.number() }),
	between: v.strictObject({ bytes: v.number(), latency: v.number() }),
});
export type Rates = v.InferOutput<typeof ratesSchema>;

/** Shares of the vendor's peaks that these kernels reach, as a first guess. */
const shares = { product: 0.4, bytes: 0.6 };

interface Accelerator {
	/** Dense bf16. */
	readonly flops: number;
	readonly bytes: number;
	readonly memory: number;
}

const accelerators: Readonly<Record<string, Accelerator>> = {
	a100: { flops: 312e12, bytes: 2.0e12, memory: 80e9 },
	h100: { flops: 989e12, bytes: 3.35e12, memory: 80e9 },
	h200: { flops: 989e12, bytes: 4.8e12, memory: 141e9 },
};

export const acceleratorNames = Object.keys(accelerators);

/**
 * 8 GPUs on NVLink in a host and a 400 Gb/s port each between hosts. Inside: what two H200s' collectives of 10 to 40 MB
 * made of a step's waits (docs/measurements/2026-11-22-h200-twenty-layers.md), a third of what the links state.
 */
export const gpuLinks: Pick<Rates, "inside" | "between"> = {
	inside: { bytes: 150e9, latency: 15e-6 },
	between: { bytes: 40e9, latency: 30e-6 },
};

/** Rates of a GPU by its short name. */
export function acceleratorRates(name: string): { readonly rates: Rates; readonly memoryBytes: number } {
	const known = accelerators[name];
	if (!known)
		throw new UserError(`There are no rates of a ${name}; known are ${acceleratorNames.join(", ")}.`, exitCodes.usage);
	return {
		memoryBytes: known.memory,
		rates: {
			device: name.toUpperCase(),
			cores: null,
			threads: 1,
			operations: {},
			product: shares.product * known.flops,
			bytes: shares.bytes * known.bytes,
			call: 4e-6,
			...gpuLinks,
		},
	};
}

/** Rates of this processor before anything was timed. */
export function processorRates(cores: number, threads: number): Rates {
	return {
		device: `CPU with ${cores} cores`,
		cores,
		threads,
		operations: {},
		product: 25e9 * threads,
		bytes: 5e9 * threads,
		call: 20e-6,
		inside: { bytes: 2e9, latency: 50e-6 },
		between: { bytes: 1e9, latency: 100e-6 },
	};
}

/** Seconds of all calls of one tally: between timed amounts the time follows the amount, on a logarithmic scale. */
export function secondsOf({ name, amount, calls }: OperationTally, rates: Rates): number {
	const points = rates.operations[name];
	if (!points || points.length === 0) {
		return calls * (rates.call + amount / (isProduct(name as OperationName) ? rates.product : rates.bytes));
	}
	return calls * (rates.call + interpolate(points, amount));
}

function interpolate(points: Rates["operations"][string], amount: number): number {
	const [first, last] = [points[0]!, points.at(-1)!];
	if (amount <= first.amount) return first.seconds * Math.min(1, Math.max(0.5, amount / first.amount));
	if (amount >= last.amount) return (last.seconds * amount) / last.amount;
	const after = points.findIndex((one) => one.amount >= amount);
	const [low, high] = [points[after - 1]!, points[after]!];
	const share = Math.log(amount / low.amount) / Math.log(high.amount / low.amount);
	return low.seconds * (high.seconds / low.seconds) ** share;
}

/** Seconds of a transfer; `ranksPerHost`: hosts hold consecutive ranks. */
export function transferSeconds({ ranks, bytes }: Transfer, rates: Rates, ranksPerHost: number): number {
	const hosts = new Set(ranks.map((rank) => Math.floor(rank / ranksPerHost)));
	const { bytes: speed, latency } = hosts.size > 1 ? rates.between : rates.inside;
	return latency + bytes / speed;
}
