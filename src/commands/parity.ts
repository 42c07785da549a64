/** `mimo parity`: reference folder in, table out, exit code 1 on a mismatch. */
import { defineCommand } from "citty";
import type { BackendName } from "../native/abi.ts";
import { print } from "../observe/output.ts";
import type { NamedTopology } from "../parallel/layout.ts";
import type { World } from "../parallel/world.ts";
import type { ParityReport } from "../parity/comparison.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";

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
				"ENCODER+LANGUAGE or ENCODER|LANGUAGE, such as tp2+tp2ep2, for a reference with an encoder; LANGUAGE alone, such as tp2pp2, for one without; 1: one process. Default: its own.",
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
			description: "How GPUs talk: nccl, a GPU for each rank; shm, where ranks share GPUs.",
			default: "nccl",
			valueHint: "KIND",
		},
		threads: { type: "string", description: "CPU threads; 0: one a core.", default: "0", valueHint: "N" },
		"cuda-graph-impl": {
			type: "string",
			description: "none, or local: runs of operations that repeat are launched as CUDA graphs.",
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
			throw new UserError(`--layout ${args.layout}: a log is compared as it is, on no layout.`, exitCodes.usage);
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

/** The layout to compare on, checked before a rank starts. */
async function chooseLayout(args: LayoutArguments): Promise<NamedTopology> {
	const { golden, layout, weights } = args;
	const { layoutFor, namedTopology, parseLayout } = await import("../parallel/layout.ts");
	const { goldenLayout, isMimoGolden, readMimoGolden } = await import("../parity/mimo/golden.ts");
	const { mtpFormat } = await import("../parity/mtp/golden.ts");
	if (mtpFormat.holds(golden)) {
		if (weights !== undefined) {
			throw new UserError(`--weights ${weights}: a reference of multi-token prediction has its own.`, exitCodes.usage);
		}
		const { planOfMtpGolden } = await import("../parity/mtp/parity.ts");
		const named = namedTopology(layoutFor(parseLayout(layout ?? "1"), { encoder: false }));
		planOfMtpGolden(named, golden);
		return named;
	}
	const { elasticFormat } = await import("../parity/elastic/golden.ts");
	if (elasticFormat.holds(golden)) {
		if (weights !== undefined) {
			throw new UserError(`--weights ${weights}: a reference of an elastic model has its own.`, exitCodes.usage);
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

/** A reference on as many ranks as the layout has. The last rank, of the language model, prints. */
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
		// With --json the report alone is printed: a program reads it.
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
	if (layout.topology.encoder === null) {
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
	throw new UserError(`--device is ${JSON.stringify(text)}; allowed are auto, cpu and cuda.`, exitCodes.usage);
}

function backendKind(text: string): BackendName {
	if (text === "nccl" || text === "shm") return text;
	throw new UserError(`--distributed-backend is ${JSON.stringify(text)}; allowed are nccl and shm.`, exitCodes.usage);
}

function withGraphs(text: string): boolean {
	if (text === "none" || text === "local") return text === "local";
	throw new UserError(`--cuda-graph-impl is ${JSON.stringify(text)}; allowed are none and local.`, exitCodes.usage);
}

function threadCount(text: string): number {
	if (/^\d{1,4}$/.test(text)) return Number(text);
	throw new UserError(`--threads is ${JSON.stringify(text)}; allowed is a whole number from 0.`, exitCodes.usage);
}

function virtualStages(text: string): number {
	if (/^[1-9]\d?$/.test(text)) return Number(text);
	throw new UserError(
		`--num-virtual-stages-per-pipeline-rank is ${JSON.stringify(text)}; allowed is a whole number from 1 to 99.`,
		exitCodes.usage,
	);
}

function positive(text: string): number {
	const value = Number(text);
	if (text.trim() !== "" && value > 0 && Number.isFinite(value)) return value;
	throw new UserError(`--tolerance is ${JSON.stringify(text)}; allowed is a positive number.`, exitCodes.usage);
}
