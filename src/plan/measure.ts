/** Times every operation of a configuration on this machine: one rank of each module runs with all others imagined. */
import { availableParallelism } from "node:os";
import type { TrainingConfiguration } from "../config/schema.ts";
import { timingLibrary } from "../native/counting-library.ts";
import { Device } from "../native/device.ts";
import type { Library } from "../native/library.ts";
import { median } from "../observe/median.ts";
import { topologyOf } from "../parallel/topology.ts";
import { Tensor } from "../tensor/tensor.ts";
import { Company } from "./company.ts";
import { amountOf, isProduct, workOf } from "./operation-work.ts";
import { openRank } from "./rank-run.ts";
import { gpuLinks, type Rates } from "./rates.ts";

/** Steps that are timed, after one that warms up: so many, and then for so many seconds. */
const timing = { least: 3, seconds: 1, most: 30 };

interface Sample {
	readonly name: string;
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
 * Seconds of every operation and of a call, from one rank of each module. On a processor others work beside it, as many as
 * the run would have on the remaining cores.
 */
export async function measureRates(
	c: TrainingConfiguration,
	library: Library,
	{ threads, ranks }: MeasuringOptions,
): Promise<Rates> {
	const samples = new Map<string, Sample>();
	const topology = topologyOf(c);
	const leaders = [...(topology.encoder ? [topology.encoder.offset] : []), topology.language.offset];
	const cores = availableParallelism();
	const companions = library.kind === "cpu" ? Math.min(Math.floor(cores / threads), ranks) - 1 : 0;
	let [hostSeconds, calls] = [0, 0];
	for (const rank of leaders) {
		const others = Array.from({ length: companions }, (_, i) => (rank + i + 1) % topology.worldSize);
		await using _company = await Company.open(c, others, threads);
		const whole = await timeSteps(c, library, rank, threads);
		const { operations: own, host, steps } = await timeOperations(c, library, rank, threads);
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

/** Seconds of a step of one microbatch. */
async function timeSteps(c: TrainingConfiguration, library: Library, rank: number, threads: number): Promise<number> {
	using device = Device.open(library, { threads });
	using run = await openRank(c, device, rank, unobserved);
	run.initialise();
	run.step(1);
	return median(
		repeat(() => {
			run.step(1);
			device.synchronize();
		}),
	);
}

/** Seconds of each of some calls. */
function repeat(call: () => void): number[] {
	const seconds: number[] = [];
	const began = performance.now();
	const over = () => performance.now() - began > timing.seconds * 1000;
	while (seconds.length < timing.least || (seconds.length < timing.most && !over())) {
		const started = performance.now();
		call();
		seconds.push((performance.now() - started) / 1000);
	}
	return seconds;
}

/** The operations of some such steps, each timed by itself, and the seconds of a step in which none ran. */
async function timeOperations(
	c: TrainingConfiguration,
	library: Library,
	rank: number,
	threads: number,
): Promise<{ readonly operations: Map<string, Sample>; readonly host: number; readonly steps: number }> {
	const operations = new Map<string, Sample>();
	let observing = false;
	let inside = 0;
	const timed = timingLibrary(library, (name, values, seconds) => {
		if (!observing) return;
		const amount = amountOf(name, workOf(name, values));
		const key = `${name} ${amount}`;
		if (!operations.has(key)) operations.set(key, { name, amount, seconds: [] });
		operations.get(key)!.seconds.push(seconds);
		inside += seconds;
	});
	using device = Device.open(timed, { threads });
	using run = await openRank(c, device, rank, unobserved);
	run.initialise();
	run.step(1);
	observing = true;
	const seconds = repeat(() => run.step(1));
	const whole = seconds.reduce((sum, one) => sum + one, 0);
	return { operations, host: Math.max(0, whole - inside) / seconds.length, steps: seconds.length };
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

/** What an operation that was not met is given: the rate of all products, and of all others. */
function overall(samples: Iterable<Sample>): Pick<Rates, "product" | "bytes"> {
	const totals = { product: [0, 0], bytes: [0, 0] };
	for (const { name, amount, seconds } of samples) {
		const total = totals[isProduct(name as Parameters<typeof isProduct>[0]) ? "product" : "bytes"];
		total[0]! += amount * seconds.length;
		total[1]! += seconds.reduce((sum, one) => sum + one, 0);
	}
	const rate = ([amount, seconds]: number[]) => Math.max(1, amount!) / Math.max(1e-9, seconds!);
	return { product: rate(totals.product), bytes: rate(totals.bytes) };
}

/** Ranks of one host copy through memory; other hosts are not here to be timed. */
function transferRates(device: Device): Pick<Rates, "inside" | "between"> {
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
	return { inside: { bytes: speed, latency: 10e-6 }, between: { bytes: speed, latency: 100e-6 } };
}
