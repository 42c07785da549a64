/**
 * Times every operation of a configuration on this machine: one rank of each module or stage runs, all other ranks are simulated.
 */

import { availableParallelism } from "node:os";
import type { TrainingConfiguration } from "../config/schema.ts";
import { timingLibrary } from "../native/counting-library.ts";
import { Device } from "../native/device.ts";
import type { Library } from "../native/library.ts";
import { median } from "../observe/series.ts";
import { topologyOf } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";
import { gpuLinks } from "./accelerators.ts";
import { ConcurrentRanks } from "./concurrent-ranks.ts";
import { amountOf, isProduct, type RatedName, ratedName, workOf } from "./operation-work.ts";
import { enoughMicrobatches } from "./rank-plan.ts";
import { openRank } from "./rank-run.ts";
import type { Rates } from "./rates.ts";
import { actorRanks } from "./run-plan.ts";

/** A time is settled when the least of its samples has not fallen for this many seconds, and after `most` seconds in any case. */
const settling = { steps: 2.5, operations: 1, most: 20 };
/** Smallest relative decrease that counts as falling. */
const fall = 0.005;

interface Sample {
	readonly name: RatedName;
	readonly amount: number;
	readonly seconds: number[];
}

export interface MeasuringOptions {
	/** CPU threads of a rank. */
	readonly threads: number;
	/** Ranks that share this machine. */
	readonly ranks: number;
}

/**
 * Seconds of every operation and of a call, from one rank of each module and stage. On a processor others work beside it, as many as
 * the run would have on the remaining cores. The least time of each counts, since disturbances only add.
 */
export async function measureRates(
	c: TrainingConfiguration,
	library: Library,
	{ threads, ranks }: MeasuringOptions,
): Promise<Rates> {
	const samples = new Map<string, Sample>();
	const topology = topologyOf(c);
	const actors = actorRanks(c);
	const cores = availableParallelism();
	const companions = library.kind === "cpu" ? Math.min(Math.floor(cores / threads), ranks) - 1 : 0;
	let [hostSeconds, calls] = [0, 0];
	for (const { ranks: members } of actors) {
		const rank = members[0]!;
		const others = Array.from({ length: companions }, (_, i) => (rank + i + 1) % topology.worldSize);
		await using company = await ConcurrentRanks.open(c, others, threads);
		const together: Together = (work) => {
			const { own, companions } = company.step(work);
			// Ranks of one grid wait for each other layer by layer, ranks of other stages only for rows.
			const peers = companions.entries().filter(([other]) => members.includes(other));
			return Math.max(own, ...peers.map(([, seconds]) => seconds));
		};
		const whole = await timeSteps(c, library, rank, threads, together);
		const { operations: own, host, steps } = await timeOperations(c, library, rank, threads, together);
		const perStep = (value: (one: Sample) => number) =>
			own.values().reduce((sum, one) => sum + (value(one) * one.seconds.length) / steps, 0);
		// Timed one by one they come to a little more or less than the step: that counts.
		const share = whole / (perStep(({ seconds }) => median(seconds)) + host);
		hostSeconds += share * host;
		calls += perStep(() => 1);
		for (const [key, { name, amount, seconds }] of own) {
			const known = samples.get(key) ?? { name, amount, seconds: [] };
			samples.set(key, known);
			known.seconds.push(...seconds.map((one) => one * share));
		}
	}
	using device = Device.open(library, { threads });
	return {
		device: device.describe().name,
		cores: library.kind === "cpu" ? cores : null,
		threads,
		operations: pointsOf(samples.values()),
		...overall(samples.values()),
		// A GPU works while its host prepares the next call.
		call: library.kind === "cpu" ? hostSeconds / calls : 0,
		// One GPU alone cannot time its links to others.
		...(library.kind === "cpu" ? transferRates(device) : gpuLinks),
	};
}

const unobserved = { phase() {}, transfer() {}, imbalance: 1 };

/** Does a step's work beside others'; its seconds. */
type Together = (work: () => void) => number;

/** Least seconds of a step. */
async function timeSteps(
	c: TrainingConfiguration,
	library: Library,
	rank: number,
	threads: number,
	together: Together,
): Promise<number> {
	using device = Device.open(library, { threads });
	using run = await openRank(c, device, rank, unobserved);
	const microbatches = enoughMicrobatches(c);
	run.initialise();
	run.step(microbatches);
	const seconds = untilSettled(settling.steps, () =>
		together(() => {
			run.step(microbatches);
			device.synchronize();
		}),
	);
	return Math.min(...seconds);
}

/** Seconds of steps, until the least of them has not fallen for `calm` seconds. */
function untilSettled(calm: number, step: () => number): number[] {
	const all: number[] = [];
	const began = performance.now();
	let [least, fell, now] = [Number.POSITIVE_INFINITY, began, began];
	while (now - fell < calm * 1000 && now - began < settling.most * 1000) {
		const seconds = step();
		all.push(seconds);
		now = performance.now();
		if (seconds < least * (1 - fall)) [least, fell] = [seconds, now];
	}
	return all;
}

/** Operations of several steps, each timed by itself, and the seconds of a step outside its operations. */
async function timeOperations(
	c: TrainingConfiguration,
	library: Library,
	rank: number,
	threads: number,
	together: Together,
): Promise<{ readonly operations: Map<string, Sample>; readonly host: number; readonly steps: number }> {
	const operations = new Map<string, Sample>();
	let observing = false;
	let inside = 0;
	const timed = timingLibrary(library, (name, values, seconds) => {
		inside += seconds;
		if (!observing) return;
		const rated = ratedName(name, values);
		const amount = amountOf(rated, workOf(name, values));
		const key = `${rated} ${amount}`;
		if (!operations.has(key)) operations.set(key, { name: rated, amount, seconds: [] });
		operations.get(key)!.seconds.push(seconds);
	});
	using device = Device.open(timed, { threads });
	using run = await openRank(c, device, rank, unobserved);
	const microbatches = enoughMicrobatches(c);
	run.initialise();
	run.step(microbatches);
	observing = true;
	const outside: number[] = [];
	const { length: steps } = untilSettled(settling.operations, () =>
		together(() => {
			inside = 0;
			const started = performance.now();
			run.step(microbatches);
			outside.push((performance.now() - started) / 1000 - inside);
		}),
	);
	return { operations, host: Math.max(0, median(outside)), steps };
}

function pointsOf(samples: Iterable<Sample>): Rates["operations"] {
	const byName: Rates["operations"] = {};
	for (const { name, amount, seconds } of samples) {
		byName[name] ??= [];
		byName[name].push({ amount, seconds: median(seconds) });
	}
	for (const points of Object.values(byName)) points.sort((a, b) => a.amount - b.amount);
	return byName;
}

/** Rates for operations that were not met: the rate of all products, and of all others. */
function overall(samples: Iterable<Sample>): Pick<Rates, "product" | "bytes"> {
	const totals = { product: [0, 0], bytes: [0, 0] };
	for (const { name, amount, seconds } of samples) {
		const total = totals[isProduct(name) ? "product" : "bytes"];
		total[0]! += amount * seconds.length;
		total[1]! += seconds.reduce((sum, one) => sum + one, 0);
	}
	const rate = ([amount, seconds]: number[]) => Math.max(1, amount!) / Math.max(1e-9, seconds!);
	return { product: rate(totals.product), bytes: rate(totals.bytes) };
}

/** Ranks of one host copy through memory; other hosts are not here to be timed. */
function transferRates(device: Device): Pick<Rates, "inside" | "between" | "host" | "exchange" | "peers"> {
	const bytes = 2 ** 24;
	using from = Tensor.zeros(device, [bytes / 4]);
	using to = Tensor.zeros(device, [bytes / 4]);
	const seconds = Array.from({ length: 5 }, () => {
		const started = performance.now();
		device.copy(to, from, bytes);
		device.synchronize();
		return (performance.now() - started) / 1000;
	});
	// In and out of the shared memory.
	const speed = bytes / median(seconds) / 2;
	return {
		inside: { bytes: speed, latency: 10e-6 },
		between: { bytes: speed, latency: 100e-6 },
		host: 2 * speed,
		exchange: 10e-6,
		peers: false,
	};
}
