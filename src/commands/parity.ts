/** `mimo parity`: compares training with a reference run; exit code 1 on a mismatch. */
import { defineCommand } from "citty";
import type { BackendName } from "../native/abi.ts";
import { print } from "../observe/output.ts";
import type { NamedTopology, World } from "../parallel/index.ts";
import type { ParityReport } from "../parity/comparison.ts";
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
		log: { type: "string", description: "A run's JSON log to compare with golden values.", valueHint: "FILE" },
		tolerance: { type: "string", description: "Relative tolerance with --log.", default: "0.05", valueHint: "NUMBER" },
		layout: {
			type: "string",
			description:
				"ENCODER+LANGUAGE or ENCODER|LANGUAGE, such as tp2+tp2ep2, for a reference with an encoder; LANGUAGE alone, such as tp2pp2, for one without; 1: one process. Default: the reference's layout.",
			valueHint: "LAYOUT",
		},
		"num-virtual-stages-per-pipeline-rank": {
			type: "string",
			description: "Segments of every pipeline stage, for a reference of multi-token prediction.",
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
		const { isMimoGolden } = await import("../parity/mimo/golden.ts");
		const { mtpFormat } = await import("../parity/mtp/golden.ts");
		const { elasticFormat } = await import("../parity/elastic/golden.ts");
		const own = isMimoGolden(args.golden) || [mtpFormat, elasticFormat].some((format) => format.holds(args.golden));
		const onRanks = own || args.layout !== undefined;
		if (args.log === undefined && onRanks) {
			await compareOnLayout(args);
			return;
		}
		if (args.layout !== undefined) {
			throw new UserError(`--layout ${args.layout}: --log compares a log, which runs on no layout.`, exitCodes.usage);
		}
		const { runParity } = await import("../parity/run.ts");
		const report = await runParity({
			golden: args.golden,
			weights: args.weights,
			log: args.log ?? null,
			tolerance: positive(args.tolerance),
			device: deviceKind(args.device),
			threads: threadCount(args.threads),
			graphs: withGraphs(args["cuda-graph-impl"]),
			precision: args.bf16 ? "bf16" : "f32",
		});
		await printReport(report, args.json ?? false);
	},
});

interface LayoutArguments {
	readonly golden: string;
	readonly weights?: string | undefined;
	readonly layout?: string | undefined;
	readonly device: string;
	readonly "num-virtual-stages-per-pipeline-rank": string;
	readonly "distributed-backend": string;
	readonly threads: string;
	readonly "cuda-graph-impl": string;
	readonly bf16?: boolean | undefined;
	readonly json?: boolean | undefined;
}

/** The layout to compare on. Throws a UserError for a layout that the reference cannot run on, before ranks start. */
async function chooseLayout(args: LayoutArguments): Promise<NamedTopology> {
	const { golden, layout, weights } = args;
	const { layoutFor, namedTopology, parseLayout } = await import("../parallel/layout.ts");
	const { goldenLayout, isMimoGolden, readMimoGolden } = await import("../parity/mimo/golden.ts");
	const { mtpFormat } = await import("../parity/mtp/golden.ts");
	if (mtpFormat.holds(golden)) {
		if (weights !== undefined) {
			throw new UserError(
				`--weights ${weights}: a reference of multi-token prediction contains its weights.`,
				exitCodes.usage,
			);
		}
		const { planOfMtpGolden } = await import("../parity/mtp/parity.ts");
		const named = namedTopology(layoutFor(parseLayout(layout ?? "1"), { encoder: false }));
		planOfMtpGolden(named, golden);
		return named;
	}
	const { elasticFormat } = await import("../parity/elastic/golden.ts");
	if (elasticFormat.holds(golden)) {
		if (weights !== undefined) {
			throw new UserError(
				`--weights ${weights}: a reference of an elastic model contains its weights.`,
				exitCodes.usage,
			);
		}
		if (args.bf16) throw new UserError("--bf16: a reference of an elastic model is compared in fp32.", exitCodes.usage);
		const { planOfElasticGolden } = await import("../parity/elastic/parity.ts");
		const named = namedTopology(layoutFor(parseLayout(layout ?? "1"), { encoder: false }));
		planOfElasticGolden(named, golden);
		return named;
	}
	if (!isMimoGolden(golden)) {
		const { planOfLanguageGolden } = await import("../parity/language/parity.ts");
		const named = namedTopology(layoutFor(parseLayout(layout!), { encoder: false }));
		planOfLanguageGolden(named, golden);
		return named;
	}
	const { checkParticipation, planOfGolden } = await import("../parity/mimo/layout-check.ts");
	const { config } = readMimoGolden(golden);
	const named = namedTopology(layoutFor(parseLayout(layout ?? goldenLayout(config)), { encoder: true }));
	checkParticipation(golden, config, planOfGolden(named, config));
	return named;
}

/** Compares on all ranks of the layout. The last rank, which is the language model's, prints. */
async function compareOnLayout(args: LayoutArguments): Promise<void> {
	const { onEveryRank } = await import("./ranks.ts");
	const named = await chooseLayout(args);
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
	await onEveryRank(options, async (world) => {
		const report = await reportOf(world, named, args);
		if (world.rank === topology.worldSize - 1) await printReport(report, args.json ?? false);
	});
}

async function reportOf(world: World, layout: NamedTopology, args: LayoutArguments): Promise<ParityReport> {
	const precision = args.bf16 ? "bf16" : "f32";
	const { mtpFormat } = await import("../parity/mtp/golden.ts");
	if (mtpFormat.holds(args.golden)) {
		const { mtpLayoutParity } = await import("../parity/mtp/parity.ts");
		const segmentsPerStage = virtualStages(args["num-virtual-stages-per-pipeline-rank"]);
		return await mtpLayoutParity(world, layout, args.golden, { precision, segmentsPerStage });
	}
	const { elasticFormat } = await import("../parity/elastic/golden.ts");
	if (elasticFormat.holds(args.golden)) {
		const { elasticLayoutParity } = await import("../parity/elastic/parity.ts");
		return await elasticLayoutParity(world, layout, args.golden);
	}
	if (layout.topology.encoders.length === 0) {
		const { languageLayoutParity } = await import("../parity/language/parity.ts");
		return await languageLayoutParity(world, layout, args.golden, { weights: args.weights, precision });
	}
	if (layout.topology.worldSize === 1) {
		const { mimoParity } = await import("../parity/mimo/one-process.ts");
		return mimoParity(world.device, args.golden, { weights: args.weights, precision });
	}
	const { mimoLayoutParity } = await import("../parity/mimo/layout.ts");
	return await mimoLayoutParity(world, layout, args.golden, { weights: args.weights, precision });
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
