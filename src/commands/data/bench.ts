/** `mimo data bench`: measures how fast a data set is read, raw or decoded. */
import { defineCommand } from "citty";
import { print } from "../../observe/output.ts";
import { datasetPath, flagError, pathArgument } from "../arguments.ts";

const args = {
	path: pathArgument,
	raw: { type: "boolean", description: "Read samples without decoding them." },
	"split-part": { type: "string", default: "train", description: "Part to read." },
	workers: { type: "string", default: "2", description: "Data workers.", valueHint: "N" },
	threads: { type: "string", description: "Threads that run the workers; default: one per worker.", valueHint: "N" },
	seconds: { type: "string", default: "5", description: "Seconds to read for.", valueHint: "N" },
	"data-memory": {
		type: "string",
		default: "1024",
		description: "Mebibytes of samples read ahead.",
		valueHint: "N",
	},
	"batch-size": { type: "string", default: "32", description: "Samples a worker hands over at once.", valueHint: "N" },
	json: { type: "boolean", description: "Print the numbers as JSON." },
} as const;

function number(name: string, text: string): number {
	if (/^[1-9]\d{0,8}$/.test(text)) return Number(text);
	throw flagError(name, text, "an integer from 1");
}

export default defineCommand({
	meta: { name: "bench", description: "Measure how fast a data set is read." },
	args,
	run: async ({ args: given }) => {
		const { benchmark } = await import("../../data/energon/tools/bench.ts");
		const workers = number("workers", given.workers);
		const result = await benchmark(datasetPath(given.path), {
			task: { kind: given.raw ? "raw" : "decoded" },
			splitPart: given["split-part"],
			workers,
			threads: given.threads === undefined ? workers : number("threads", given.threads),
			seconds: number("seconds", given.seconds),
			memoryBytes: number("data-memory", given["data-memory"]) * 2 ** 20,
			batchSize: number("batch-size", given["batch-size"]),
		});
		if (given.json) {
			print(JSON.stringify(result));
			return;
		}
		const { samplesPerSecond, samplesPerCoreSecond, megabytesPerSecond, firstSampleSeconds, anonymousBytes } = result;
		print(
			`${samplesPerSecond.toFixed(0)} ${given.raw ? "raw" : "decoded"} samples/s, ${samplesPerCoreSecond.toFixed(0)} a core, ${megabytesPerSecond.toFixed(1)} MB/s; ` +
				`first after ${firstSampleSeconds.toFixed(2)} s; ${(anonymousBytes / 2 ** 20).toFixed(0)} MiB of memory`,
		);
	},
});
