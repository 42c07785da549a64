/**
 * The rates of a machine: measured by `mimo plan --measure`, or known beforehand (accelerators.ts). Products are rated in
 * operations a second, everything else in bytes a second.
 */
import * as v from "valibot";
import { counted } from "../system/counted.ts";
import { isProduct } from "./operation-work.ts";
import type { OperationTally } from "./rank-plan.ts";
import type { Transfer } from "./simulated-group.ts";

const point = v.strictObject({ amount: v.number(), seconds: v.number() });

export const ratesSchema = v.strictObject({
	/** Name of the device. */
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
	/** Bytes a second from a rank's device to its host's memory. */
	host: v.number(),
	/** Seconds in which a rank stands still while its host waits for values of others, such as how many rows go where. */
	exchange: v.number(),
	/** Whether GPUs of a host open each other's memory: then no host waits for the counts of experts' rows. */
	peers: v.boolean(),
});
export type Rates = v.InferOutput<typeof ratesSchema>;

/** Rates of this processor before anything was timed. */
export function processorRates(cores: number, threads: number): Rates {
	return {
		device: `CPU with ${counted(cores, "core")}`,
		cores,
		threads,
		operations: {},
		product: 25e9 * threads,
		bytes: 5e9 * threads,
		call: 20e-6,
		inside: { bytes: 2e9, latency: 50e-6 },
		between: { bytes: 1e9, latency: 100e-6 },
		host: 4e9,
		exchange: 50e-6,
		peers: false,
	};
}

/** Seconds of all calls of one tally: between timed amounts the time follows the amount, on a logarithmic scale. */
export function secondsOf({ name, amount, calls }: OperationTally, rates: Rates): number {
	const points = rates.operations[name];
	if (!points || points.length === 0) {
		return calls * (rates.call + amount / (isProduct(name) ? rates.product : rates.bytes));
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

/** Whether ranks are on several hosts; a host holds consecutive ranks. */
export function spansHosts(ranks: readonly number[], ranksPerHost: number): boolean {
	return new Set(ranks.map((rank) => Math.floor(rank / ranksPerHost))).size > 1;
}

/**
 * Bytes of a transfer that leave the host of the rank that sends: of rows that go to each rank by themselves those to other hosts,
 * and else all of a transfer among several hosts. `ranksPerHost`: hosts hold consecutive ranks.
 */
export function networkBytes({ ranks, bytes, rows }: Transfer, ranksPerHost: number): number {
	if (!spansHosts(ranks, ranksPerHost)) return 0;
	if (!rows) return bytes;
	const hostOf = (rank: number) => Math.floor(rank / ranksPerHost);
	const leaves = (member: number) => hostOf(ranks[member]!) !== hostOf(rows.from);
	return rows.bytes.reduce((sum, one, member) => sum + (leaves(member) ? one : 0), 0);
}

/** Seconds of a transfer: the part between hosts, then the part inside the host. */
export function transferSeconds(transfer: Transfer, rates: Rates, ranksPerHost: number): number {
	const { kind, ranks, bytes } = transfer;
	if (kind === "exchange") return rates.exchange;
	const between = spansHosts(ranks, ranksPerHost);
	const outside = networkBytes(transfer, ranksPerHost);
	const moving = outside / rates.between.bytes + (bytes - outside) / rates.inside.bytes;
	const waits = kind === "planRows" && (between || !rates.peers);
	return (between ? rates.between : rates.inside).latency + moving + (waits ? rates.exchange : 0);
}
