/** Measures the read rate of a data set. */
import { UserError } from "../../../system/errors.ts";
import { defaultLoaderConfiguration, type TaskConfiguration } from "../loader/configuration.ts";
import { DataLoader } from "../loader/loader.ts";

export interface BenchOptions {
	readonly task: TaskConfiguration;
	readonly splitPart: string;
	readonly workers: number;
	readonly threads: number;
	readonly seconds: number;
	readonly memoryBytes: number;
	/** Number of samples in an output of a worker. */
	readonly batchSize: number;
}

export interface BenchResult {
	readonly samples: number;
	/** Measured after a warm-up of half the time. */
	readonly samplesPerSecond: number;
	/** Samples per second of processor time of all threads, which is the rate of one core. */
	readonly samplesPerCoreSecond: number;
	readonly megabytesPerSecond: number;
	/** Seconds until the first sample, with the opening of the data set. */
	readonly firstSampleSeconds: number;
	/** Bytes of this process's memory without mapped files. */
	readonly anonymousBytes: number;
}

export async function benchmark(path: string, options: BenchOptions): Promise<BenchResult> {
	const { task, workers, threads, seconds, memoryBytes, batchSize, splitPart } = options;
	const begun = performance.now();
	const load = { ...defaultLoaderConfiguration.load, splitPart };
	const configuration = { ...defaultLoaderConfiguration, path, task, load, numWorkers: workers, batchSize };
	await using loader = await DataLoader.open(configuration, {
		...{ threads, memoryBytes, decodingBytes: memoryBytes, prefetch: 16, skipBudget: 1e9 },
	});
	const next = async () => {
		const output = await loader.next();
		if (output === null) throw new UserError(`${path} has no samples in ${splitPart}.`);
	};
	await next();
	const firstSampleSeconds = (performance.now() - begun) / 1000;
	// Warms up the just-in-time compiler.
	for (const warm = performance.now(); performance.now() - warm < seconds * 500; ) await next();
	const bytesBefore = loader.receivedBytes;
	const cpuBefore = process.cpuUsage();
	const started = performance.now();
	let outputs = 0;
	while (performance.now() - started < seconds * 1000) {
		await next();
		outputs++;
	}
	const elapsed = (performance.now() - started) / 1000;
	const { user, system } = process.cpuUsage(cpuBefore);
	const samples = outputs * batchSize;
	return {
		samples,
		samplesPerSecond: samples / elapsed,
		samplesPerCoreSecond: (samples * 1e6) / (user + system),
		megabytesPerSecond: (loader.receivedBytes - bytesBefore) / elapsed / 1e6,
		firstSampleSeconds,
		anonymousBytes: await anonymousMemory(),
	};
}

/** RssAnon of this process. */
async function anonymousMemory(): Promise<number> {
	const status = await Bun.file("/proc/self/status").text();
	return Number(/^RssAnon:\s+(\d+) kB$/m.exec(status)?.[1] ?? 0) * 1024;
}
