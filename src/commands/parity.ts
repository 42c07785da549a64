/** `mimo parity`: compares training with a reference run; exit code 1 on a mismatch. */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import { defineCommand } from "citty";
import type { BackendName } from "../native/abi.ts";
import { print } from "../observe/output.ts";
import type { NamedTopology } from "../parallel/index.ts";
import type { ParityReport } from "../parity/comparison.ts";
import type { CompareOptions } from "../parity/reference.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { flagError } from "./arguments.ts";

export default defineCommand({
	meta: { name: "parity", description: "Compare training with reference runs." },
	args: {
		golden: {
			type: "string",
			description: "Folder of a reference run, or Megatron golden values (JSON) or TensorBoard events for --log.",
			valueHint: "PATH",
			required: true,
		},
		weights: {
			type: "string",
			description: "Checkpoint of any format with the reference's initial weights; default: the reference's own.",
			valueHint: "PATH",
		},
		log: {
			type: "string",
			description: "A run's JSON log, or its folder of TensorBoard events, to compare with golden values.",
			valueHint: "PATH",
		},
		config: {
			type: "string",
			description:
				"With --log: model_config.yaml of a functional test of Megatron, whose METRICS and tolerances count.",
			valueHint: "FILE",
		},
		tolerance: { type: "string", description: "Relative tolerance with --log.", default: "0.05", valueHint: "NUMBER" },
		layout: {
			type: "string",
			description:
				"ENCODER+LANGUAGE or ENCODER|LANGUAGE, such as tp2+tp2ep2, for a reference with an encoder; LANGUAGE alone, such as tp2pp2, for one without; 1: one process. Default: the reference's layout.",
			valueHint: "LAYOUT",
		},
		"num-virtual-stages-per-pipeline-rank": {
			type: "string",
			description: "Segments of every pipeline stage.",
			default: "1",
			valueHint: "N",
		},
		device: { type: "string", description: "auto, cpu or cuda.", default: "auto", valueHint: "KIND" },
		"distributed-backend": {
			type: "string",
			description: "Communication between GPUs: nccl, with a GPU for each rank; shm, where ranks share GPUs.",
			default: "nccl",
			valueHint: "KIND",
		},
		threads: {
			type: "string",
			description: "CPU threads of a rank; 0: an equal share of the cores.",
			default: "0",
			valueHint: "N",
		},
		"cuda-graph-impl": {
			type: "string",
			description: "none, or local: repeated sequences of operations are launched as CUDA graphs.",
			default: "none",
			valueHint: "KIND",
		},
		bf16: {
			type: "boolean",
			description: "Train in bf16: the first ten losses within 1 %, the mean of all within 0.5 %.",
		},
		json: { type: "boolean", description: "Print every compared value as JSON." },
	},
	run: async ({ args }) => {
		const tolerance = positive(args.tolerance);
		if (args.log !== undefined) {
			if (args.layout !== undefined) {
				throw new UserError(`--layout ${args.layout}: --log compares a log, which runs on no layout.`, exitCodes.usage);
			}
			requireGiven(args.golden);
			const { logParity } = await import("../parity/log.ts");
			for (const path of [args.log, args.config]) if (path !== undefined) requireFile(path);
			const options = { tolerance, test: args.config ?? null };
			await printReport(logParity(args.golden, args.log, options), args.json ?? false);
			return;
		}
		if (args.config !== undefined) throw new UserError(`--config ${args.config}: it needs --log.`, exitCodes.usage);
		const { curveOf } = await import("../parity/log.ts");
		if (curveOf(args.golden) !== null) {
			throw new UserError(`${args.golden} has no weights to train from: --log compares a run with its losses.`);
		}
		const { layoutOf } = await import("../parity/formats.ts");
		const asked = { layout: args.layout ?? null, weights: args.weights ?? null, bf16: args.bf16 ?? false };
		const named = layoutOf(args.golden, asked);
		await (named === null ? compareInProcess(args) : compareOnLayout(named, args));
	},
});

interface TrainingArguments {
	readonly golden: string;
	readonly weights?: string | undefined;
	readonly device: string;
	readonly "num-virtual-stages-per-pipeline-rank": string;
	readonly "distributed-backend": string;
	readonly threads: string;
	readonly "cuda-graph-impl": string;
	readonly bf16?: boolean | undefined;
	readonly json?: boolean | undefined;
}

function compareOptions(args: TrainingArguments): CompareOptions {
	return {
		weights: args.weights ?? null,
		precision: args.bf16 ? "bf16" : "f32",
		segmentsPerStage: virtualStages(args["num-virtual-stages-per-pipeline-rank"]),
	};
}

/** Compares in this process. */
async function compareInProcess(args: TrainingArguments): Promise<void> {
	const { golden } = args;
	requireGiven(golden);
	if (!statSync(golden).isDirectory() || !existsSync(join(golden, "golden.json"))) {
		throw new UserError(
			`${golden} is no reference folder (golden.json is missing); golden values need --log FILE to compare with.`,
		);
	}
	const { openDevice } = await import("../native/open-device.ts");
	const { compareAlone } = await import("../parity/formats.ts");
	const options = { threads: threadCount(args.threads), graphs: withGraphs(args["cuda-graph-impl"]) };
	using device = await openDevice(deviceKind(args.device), options);
	await printReport(await compareAlone(device, golden, compareOptions(args)), args.json ?? false);
}

/** Compares on all ranks of a layout. The last rank, which is the language model's, prints. */
async function compareOnLayout(named: NamedTopology, args: TrainingArguments): Promise<void> {
	const { onEveryRank } = await import("./ranks.ts");
	const { topology } = named;
	const options = {
		ranks: topology.worldSize,
		device: deviceKind(args.device),
		backend: backendKind(args["distributed-backend"]),
		threads: threadCount(args.threads),
		graphs: withGraphs(args["cuda-graph-impl"]),
		configuration: { golden: args.golden, layout: named.name },
		describe: (rank: number) => topology.describe(rank),
		reporter: topology.worldSize - 1,
		timeoutMinutes: 10,
		// The output of --json is parsed by programs.
		quiet: args.json ?? false,
	};
	const compared = compareOptions(args);
	await onEveryRank(options, async (world) => {
		const { formatOf } = await import("../parity/formats.ts");
		const { compareTraining } = await import("../parity/reference.ts");
		const report = await compareTraining(world, named, formatOf(args.golden), args.golden, compared);
		if (world.rank === topology.worldSize - 1) await printReport(report, args.json ?? false);
	});
}

function requireGiven(golden: string): void {
	if (!existsSync(golden)) throw new UserError(`There is no reference at ${golden}.`);
}

function requireFile(path: string): void {
	if (!existsSync(path)) throw new UserError(`There is no ${path}.`);
}

async function printReport(report: ParityReport, json: boolean): Promise<void> {
	const { renderReport, holds } = await import("../parity/comparison.ts");
	const passed = report.checks.every(holds);
	print(json ? JSON.stringify({ ...report, passed }, null, 2) : renderReport(report));
	if (!passed) process.exitCode = exitCodes.failure;
}

function deviceKind(text: string): "auto" | "cpu" | "cuda" {
	if (text === "auto" || text === "cpu" || text === "cuda") return text;
	throw flagError("device", text, "auto, cpu or cuda");
}

function backendKind(text: string): BackendName {
	if (text === "nccl" || text === "shm") return text;
	throw flagError("distributed-backend", text, "nccl or shm");
}

function withGraphs(text: string): boolean {
	if (text === "none" || text === "local") return text === "local";
	throw flagError("cuda-graph-impl", text, "none or local");
}

function threadCount(text: string): number {
	if (/^\d{1,4}$/.test(text)) return Number(text);
	throw flagError("threads", text, "an integer from 0 to 9999");
}

function virtualStages(text: string): number {
	if (/^[1-9]\d?$/.test(text)) return Number(text);
	throw flagError("num-virtual-stages-per-pipeline-rank", text, "an integer from 1 to 99");
}

function positive(text: string): number {
	const value = Number(text);
	if (text.trim() !== "" && value > 0 && Number.isFinite(value)) return value;
	throw flagError("tolerance", text, "a number greater than 0");
}
