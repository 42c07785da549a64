/** Times every operation of a configuration on this machine: one rank of each module runs with all others imagined. */
import { availableParallelism } from "node:os";
import type { TrainingConfiguration } from "../config/schema.ts";
import { timingLibrary } from "../native/counting-library.ts";
import { Device } from "../native/device.ts";
import type { Library } from "../native/library.ts";
import { median } from "../observe/median.ts";
import { topologyOf } from "../parallel/topology.ts";
import { Tensor } from "../tensor/tensor.ts";
import { amountOf, isProduct, workOf } from "./operation-work.ts";
import { openRank } from "./rank-run.ts";
import type { Rates } from "./rates.ts";

/** Steps: the first one warms up. */
const steps = 4;

interface Sample {
	readonly name: string;
	readonly amount: number;
	readonly seconds: number[];
}

/** `threads`: CPU threads of a rank. */
export async function measureRates(c: TrainingConfiguration, library: Library, threads: number): Promise<Rates> {
	const samples = new Map<string, Sample>();
	const topology = topologyOf(c);
	const ranks = [...(topology.encoder ? [topology.encoder.offset] : []), topology.language.offset];
	let timing = false;
	let [hostSeconds, calls] = [0, 0];
	const timed = timingLibrary(library, (name, values, seconds) => {
		if (!timing) return;
		const amount = amountOf(name, workOf(name, values));
		const key = `${name} ${amount}`;
		if (!samples.has(key)) samples.set(key, { name, amount, seconds: [] });
		samples.get(key)!.seconds.push(seconds);
		hostSeconds -= seconds;
		calls++;
	});
	for (const rank of ranks) {
		using device = Device.open(timed, { threads });
		using run = await openRank(c, device, rank, { phase() {}, transfer() {}, imbalance: 1 });
		run.initialise();
		run.step(1);
		timing = true;
		for (let step = 1; step < steps; step++) {
			const started = performance.now();
			run.step(1);
			device.synchronize();
			hostSeconds += (performance.now() - started) / 1000;
		}
		timing = false;
	}
	using device = Device.open(library, { threads });
	return {
		device: device.describe().name,
		cores: library.kind === "cpu" ? availableParallelism() : null,
		threads,
		operations: pointsOf(samples.values()),
		...overall(samples.values()),
		// A GPU works while its host prepares the next call.
		call: library.kind === "cpu" ? Math.max(0, hostSeconds / calls) : 0,
		...transferRates(device),
	};
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
	return { inside: { bytes: speed, latency: 50e-6 }, between: { bytes: speed, latency: 100e-6 } };
}
