/** `mimo verify`: compares layouts of ranks with one process; exit code 1 if one differs by more than rounding. */
import { hasEncoder } from "../config/derive.ts";
import { gridKeys } from "../config/keys/parallel.ts";
import { type TrainingConfiguration, textOf } from "../config/schema.ts";
import { print } from "../observe/output.ts";
import type { Layout } from "../parallel/index.ts";
import type { Plan } from "../parity/verify/samples.ts";
import type { Subject } from "../parity/verify/subject.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes, signalled } from "../system/exit-codes.ts";
import { configurationOfArguments, configuredCommand, flagError } from "./arguments.ts";
import type { RankOptions } from "./ranks.ts";

const help = `mimo verify --layouts LIST [--preset NAME] [--config FILE.yaml] [FLAGS]

Trains one batch of samples in one process that holds all modules (layout 1), then on every layout of the list,
and compares losses, gradient norm, every parameter's gradient, the optimizer on its own, ZeRO-1 on with off, and with
--delay-wgrad-compute delayed weight gradients with immediate ones. Exit code 1 if a difference exceeds the tolerance.

  --layouts LIST       Layouts separated by commas: ENCODER+LANGUAGE on ranks of their own, ENCODER|LANGUAGE on the same
                       ranks, LANGUAGE alone where there is no encoder; several encoders have a side each
                       (1+2|tp2). A side is any of tpN cpN dpN ppN epN etpN written together, or a number, which means
                       dp; ranks of a side = tp × cp × dp × pp. 1: one process.
  --tolerance NUMBER   Largest difference, relative to the reference (of tensors: root mean square over root mean
                       square). Three times the noise of this machine is allowed too, up to 1e-4. Default 1e-5.
  --samples KIND       random (default): packs of three sequences of random text, images of different sizes, and text
                       alone, so that every path is taken. data: the first batch of the configured data.
  --text-only N        Random samples at the end of the batch that have no image. Default: a quarter of them, with
                       --policy half.
  --policy             Show what encoder-grad-participation corrected would change in every layout.
  --json               Print everything as JSON.
  --reference FOLDER   Keep the reference and the layouts' results in this folder. Where a launcher such as torchrun has
                       started this process: compare the one layout of --layouts with the reference that is there.

The batch is global-batch-size samples of seq-length tokens. The reference takes them one at a time, the layouts
micro-batch-size of them together and at least two, or as many as a layout needs; all take micro-batch-size where a
balancing loss depends on it. Grids in the configuration do not count.`;

/** About a hundred roundings of single precision. */
const defaultTolerance = 1e-5;

/** Flags that are not configuration keys, and whether they take a value. */
const ownFlags = {
	layouts: true,
	tolerance: true,
	samples: true,
	"text-only": true,
	reference: true,
	policy: false,
	json: false,
};

export default configuredCommand({
	name: "verify",
	description: "Check that layouts of ranks compute what one process computes.",
	help,
	ownFlags,
	run: async (args) => {
		const resolved = configurationOfArguments(args, ownFlags, { unchecked: gridKeys });
		await verifyLayouts(args, resolved.configuration, resolved.command);
	},
});

type Flags = Readonly<Record<string, string>>;

async function verifyLayouts(args: readonly string[], c: TrainingConfiguration, flags: Flags): Promise<void> {
	const { layoutFor, namedTopology, parseLayouts } = await import("../parallel/layout.ts");
	const { encoderNames, microBatchSizes, poolingReason } = await import("../parity/verify/subject.ts");
	const { referencePlan } = await import("../parity/verify/reference.ts");
	const { planOf, requireEqualMicrobatches } = await import("../parity/verify/samples.ts");
	if (flags.layouts === undefined) {
		throw new UserError('verify needs --layouts, such as --layouts "1+1,tp2+dp2ep2".', exitCodes.usage);
	}
	const given = parseLayouts(flags.layouts);
	const subject = await subjectFor(c, flags);
	const layouts = given.map((layout) => layoutFor(layout, { encoders: subject.encoders.length }));
	const { sequenceLength, samples } = subject;
	const sizes = { samples: samples.length, microBatchSize: microBatchSizes(subject).layouts, sequenceLength };
	const reference = referencePlan(subject);
	const pooled = poolingReason(subject);
	const plans = layouts.map((layout) => {
		const plan = planOf(namedTopology(layout, encoderNames(subject)), sizes);
		if (pooled !== null) requireEqualMicrobatches(plan, reference, pooled);
		checkLayout(args, c, layout, plan);
		return plan;
	});
	const { placeFromEnvironment } = await import("../launch/place.ts");
	const place = placeFromEnvironment();
	if (place !== null) await compareAsRank(c, flags, subject, plans, place.launcher);
	else await compareAll(c, flags, subject, plans);
}

async function subjectFor(c: TrainingConfiguration, flags: Flags): Promise<Subject> {
	const { subjectOf, subjectOfData } = await import("../parity/verify/subject.ts");
	const { samples = "random" } = flags;
	const purpose = "policy" in flags ? "policies" : "layouts";
	if (samples === "random") return subjectOf(c, textOnlySamples(c, flags), purpose);
	if (samples !== "data") {
		throw flagError("samples", samples, "random (drawn) or data (the configured data's)");
	}
	if (flags["text-only"] === undefined) return await subjectOfData(c, purpose);
	throw new UserError(
		"--text-only is for random samples; --samples data takes the samples of the data.",
		exitCodes.usage,
	);
}

/** The configuration with the layout's grids, checked like any other. */
function checkLayout(
	args: readonly string[],
	c: TrainingConfiguration,
	layout: Layout,
	{ microBatchSize, topology }: Plan,
): void {
	const { encoders, language } = layout;
	const [vision, ...others] = hasEncoder(c) ? encoders : [undefined, ...encoders];
	const modules = c.modules.map((module, index) => {
		const { shape, colocated } = others[index]!;
		if (shape.pipeline > 1) {
			const message = `Layout ${layout.text}: ${module.name} has no pipeline stages; allowed is pp 1.`;
			throw new UserError(message, exitCodes.usage);
		}
		return { ...module, ranks: colocated ? "language" : "own", tp: shape.tensor, dp: shape.data };
	});
	const grids: Partial<Record<(typeof gridKeys)[number], number>> = {
		...(vision && {
			"encoder-tp": vision.shape.tensor,
			"encoder-dp": vision.shape.data,
			"encoder-pp": vision.shape.pipeline,
		}),
		"llm-offset": topology.language.offset,
		"llm-tp": language.tensor,
		"llm-cp": language.context ?? 1,
		"llm-dp": language.data,
		"llm-ep": language.expert,
		"llm-pp": language.pipeline,
		"llm-expt-tp": language.expertTensor,
		"tensor-parallel-num-weight-shards": language.tensor,
		"expert-tensor-parallel-num-weight-shards": language.expertTensor,
	};
	const values = {
		...grids,
		...(modules.length > 0 && { modules: JSON.stringify(modules) }),
		"micro-batch-size": microBatchSize,
		"eval-micro-batch-size": microBatchSize,
	};
	try {
		configurationOfArguments(
			[...args, ...Object.entries(values).flatMap(([key, value]) => [`--${key}`, String(value)])],
			ownFlags,
		);
	} catch (error) {
		if (error instanceof UserError) throw new UserError(`Layout ${layout.text}: ${error.message}`, error.exitCode);
		throw error;
	}
}

function textOnlySamples(c: TrainingConfiguration, flags: Flags): number {
	const given = flags["text-only"];
	if (given !== undefined && !hasEncoder(c)) {
		throw new UserError(
			"--text-only is for a model with an encoder: without one all samples are text.",
			exitCodes.usage,
		);
	}
	if (given === undefined) return Math.floor(c.globalBatchSize / ("policy" in flags ? 2 : 4));
	const count = /^\d{1,9}$/.test(given) ? Number(given) : Number.NaN;
	if (count < c.globalBatchSize) return count;
	throw flagError("text-only", given, `an integer from 0 below global-batch-size (${c.globalBatchSize})`);
}

function toleranceOf(text: string | undefined): number {
	if (text === undefined) return defaultTolerance;
	const value = Number(text);
	if (text.trim() !== "" && value >= 0 && Number.isFinite(value)) return value;
	throw flagError("tolerance", text, "a number from 0");
}

/** Options of launching a layout's ranks, without recordings, which so short a run does not need. */
async function optionsOf(c: TrainingConfiguration, { name, topology }: Plan): Promise<RankOptions> {
	const { rankOptions } = await import("./ranks.ts");
	const configuration = { ...textOf(c), layouts: name };
	return { ...rankOptions(c, topology, 0), configuration, recordings: null, quiet: true };
}

/** Runs this process as a rank of the one layout that it was launched for. */
async function compareAsRank(
	c: TrainingConfiguration,
	flags: Flags,
	subject: Subject,
	plans: readonly Plan[],
	launcher: number | null,
): Promise<void> {
	const [plan] = plans;
	if (plans.length !== 1 || flags.reference === undefined) {
		throw new UserError(
			"Under a launcher, verify compares one layout of --layouts and needs --reference FOLDER.",
			exitCodes.usage,
		);
	}
	const { onEveryRank } = await import("./ranks.ts");
	const { policyOnRank, reportOfRanks, verifyOnRank } = await import("../parity/verify/verify.ts");
	const folder = flags.reference;
	const policy = "policy" in flags;
	await onEveryRank(await optionsOf(c, plan!), async (world) => {
		await (policy ? policyOnRank : verifyOnRank)(world, plan!, subject, folder);
		// The results are read by mimo's own launcher; under another launcher, by the last rank.
		const last = world.rank === plan!.topology.worldSize - 1;
		if (launcher !== null || policy || !last) return;
		const { reportJson, renderLayouts } = await import("../parity/verify/verdict.ts");
		const { reference, report } = reportOfRanks(plan!, folder, toleranceOf(flags.tolerance));
		print("json" in flags ? reportJson(reference, [report]) : renderLayouts([report]));
		if (report.failures.length > 0) process.exitCode = exitCodes.failure;
	});
}

async function compareAll(
	c: TrainingConfiguration,
	flags: Flags,
	subject: Subject,
	plans: readonly Plan[],
): Promise<void> {
	const { openDevice } = await import("../native/open-device.ts");
	const { World } = await import("../parallel/world.ts");
	const { reportJson, renderLayouts, renderReference } = await import("../parity/verify/verdict.ts");
	const { comparePolicies, VerifyFolder, verify } = await import("../parity/verify/verify.ts");
	const { launchRanks } = await import("./ranks.ts");
	const tolerance = toleranceOf(flags.tolerance);
	const json = "json" in flags;
	using folder = new VerifyFolder(flags.reference);
	using device = await openDevice(c.device, {
		threads: c.threads,
		deterministic: c.deterministicMode,
		graphs: c.cudaGraphImpl === "local",
	});
	using alone = World.alone(device);
	const args = process.argv.slice(2);
	const options = {
		subject,
		plans,
		folder: folder.path,
		alone,
		launch: async (plan: Plan) => {
			// The last of a repeated flag counts.
			const own = [...args, "--layouts", plan.name, "--reference", folder.path];
			const exitCode = await launchRanks(await optionsOf(c, plan), own);
			if (exitCode <= signalled) return exitCode;
			folder[Symbol.dispose]();
			process.exit(exitCode);
		},
	};
	if ("policy" in flags) {
		const { renderPolicy } = await import("../parity/verify/policy.ts");
		const reports = await comparePolicies(options);
		print(json ? JSON.stringify(reports, null, 2) : renderPolicy(reports));
		if (reports.some(({ result }) => result === null)) process.exitCode = exitCodes.failure;
		return;
	}
	const { reference, reports } = await verify({
		...options,
		tolerance,
		onReference: (made) => {
			if (!json) print(renderReference(subject, made));
		},
	});
	print(json ? reportJson(reference, reports) : renderLayouts(reports));
	if (reports.some(({ failures }) => failures.length > 0)) process.exitCode = exitCodes.failure;
}
