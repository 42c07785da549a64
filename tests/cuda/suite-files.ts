/** Which test files run on a device, and how many processes hold it meanwhile. */
import { relative, resolve } from "node:path";

/** Files that one process of `bun test` runs one after another. */
export interface Job {
	readonly files: readonly string[];
	/** Processes that hold the device at once, at most. */
	readonly processes: number;
}

const tests = resolve(import.meta.dir, "..");

/** Files whose device is that of their own process: these share a few processes. */
const own = [
	"tensor/*",
	"native/{adamw,copies,elementwise,events,exp,philox,reductions}",
	"optim/{rounded-weights,weight-decay}",
	"models/{lora,residual-sums}",
	"models/language/qwen3-moe",
	"models/vit/{packing,random-crop}",
	"models/vision/{encoder,merge}",
	"decode/{cache,decode}",
	"guests/elastic/{extract,meter,permute,training}",
	"checkpoint/lora/peft",
	"checkpoint/torch-dist/pipeline-buffers",
	"checkpoint/training/{conversions,experts,megatron}",
	"parallel/data-parallel",
	"parity/{bf16,elastic,language,mimo,mtp,near-ties}",
	"train/{blocks,distillation,equal-steps,force-load-balancing,loss-weights,mtp,selective-recompute,step}",
	"train/restart/hugging-face",
];
const ownProcesses = 4;

/** Files that start rank programs: these share a process too, which keeps its ranks for the next file. */
const ranks = [
	"parallel/{collectives,edge,encoder,expert-exchange,gradient-memory,hierarchical-rows,language,mimo}",
	"guests/elastic/{copies,family}",
	"guests/balance",
	"checkpoint/training/language",
	"parity/verify/{distillation,elastic,experts,late-weight-gradients,lora,loss-mean,verify}",
];
const mostRanks = 8;

/** Files that run commands, and the most ranks of one of them; those of features that no other proof shows on GPUs come first. */
const commands: readonly [pattern: string, ranks: number][] = [
	["e2e/checkpoints", 6],
	["e2e/checkpoint-failures", 6],
	["guests/elastic/commands", 4],
	["inference/generate", 4],
	["inference/evaluate", 4],
	["e2e/vision-language-weights", 4],
	["e2e/pipeline-checkpoints", 4],
	["e2e/vision-language", 8],
	["guests/elastic/{resume,distillation}", 2],
	["e2e/{lora,trackers}", 2],
	["e2e/{narrow-moments,train,timers}", 2],
	["e2e/energon-train", 6],
	["e2e/reference-layouts/language", 4],
	["observe/trace", 4],
	["parity/mimo-golden", 3],
	["e2e/verify", 6],
	["e2e/text-only", 8],
	// It looks for what any run leaves in /dev/shm.
	["launch/launcher", mostRanks + 1],
];

/** A GPU has products in e4m3 for bf16 and sizes in steps of 16 alone: operations_check.cpp holds them to the processor's. */
const onProcessors = ["tests/tensor/e4m3.test.ts"];

function filesOf(patterns: readonly string[], parts: readonly string[]): string[] {
	return patterns
		.flatMap((pattern) => {
			const found = [...new Bun.Glob(`${pattern}.test.ts`).scanSync(tests)];
			// At least a file for each alternative; Bun's Glob finds none for an alternative with a slash.
			if (found.length < pattern.split(",").length) throw new Error(`Too few test files match ${pattern}.`);
			return found.sort();
		})
		.map((file) => relative(resolve(tests, ".."), resolve(tests, file)))
		.filter((file) => !onProcessors.includes(file))
		.filter((file) => parts.length === 0 || parts.some((part) => file.includes(part)));
}

/** The jobs of the files whose path has one of `parts`, or of all, in the order in which they should start. */
export function suiteJobs(parts: readonly string[]): Job[] {
	const alone = filesOf(own, parts);
	const jobs: Job[] = [
		{ files: filesOf(ranks, parts), processes: mostRanks + 1 },
		...Array.from({ length: ownProcesses }, (_, i) => ({
			files: alone.filter((_, at) => at % ownProcesses === i),
			processes: 1,
		})),
		...commands.flatMap(([pattern, processes]) =>
			filesOf([pattern], parts).map((file) => ({ files: [file], processes })),
		),
	];
	return jobs.filter(({ files }) => files.length > 0);
}
