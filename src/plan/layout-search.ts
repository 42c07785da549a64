/** `mimo plan --split`: searches the layouts of a run on N devices, most tokens a second first. */
import type { ResolvedConfiguration } from "../config/resolve.ts";
import type { Key, TrainingConfiguration } from "../config/schema.ts";
import { topologyOf } from "../parallel/index.ts";
import type { Actor } from "../schedule/actions.ts";
import { boundOf, type StepBound } from "./bound.ts";
import { estimateStep, type PlannedActor, type StepEstimate } from "./estimate.ts";
import { kindOf, type LayoutFlags, type LayoutKind, layoutCheck, layouts } from "./layout-candidates.ts";
import { planRank, type RankPlan } from "./rank-plan.ts";
import { microbatchesOf } from "./rank-run.ts";
import { roughEstimateOf } from "./rough-estimate.ts";
import { actorRanks, conditionsOf, type Machine, trafficOf } from "./run-plan.ts";

export interface Split {
	/** Layout as `mimo train` takes it. */
	readonly layout: LayoutFlags;
	readonly kind: LayoutKind;
	readonly encoderRanks: number;
	readonly languageRanks: number;
	readonly tokensPerSecond: number;
	readonly step: StepEstimate;
	/** Of the rank that needs most, bytes; and without activations. */
	readonly peak: number;
	readonly states: number;
	readonly fits: boolean;
	/** Of the rank that sends most, in a step. */
	readonly communication: { readonly bytes: number; readonly seconds: number };
	readonly bound: StepBound;
	/** The reason for the step's time, or for too much memory, in words. */
	readonly reason: string;
}

/** Keys that are tried with a layout that does not fit. */
const recomputing = {
	"recompute-granularity": "full",
	"recompute-method": "uniform",
	"recompute-num-layers": 1,
} as const satisfies Partial<Record<Key, unknown>>;

/**
 * Limits of the search, in layouts: `ofKind` of every kind are counted, up to `unfit` of a kind while none of it fits; then the fastest by
 * the rough estimate, until there are `all` and `fitting` of them fit, or `most` in any case.
 */
const counted = { ofKind: 2, unfit: 6, all: 40, fitting: 10, most: 120 };

export interface RankedSplits {
	/** Most tokens a second first. */
	readonly splits: readonly Split[];
	/** Layouts that the numbers of ranks allow; more than splits: the others have a worse outlook. */
	readonly layouts: number;
}

export async function rankSplits(
	resolved: ResolvedConfiguration,
	devices: number,
	machine: Machine,
): Promise<RankedSplits> {
	const outlook = roughEstimateOf(resolved.configuration, machine);
	const memory = machine.memoryBytes ?? Number.POSITIVE_INFINITY;
	const found = [...layouts(resolved, devices)].map((layout) => ({ ...layout, outlook: outlook(layout) }));
	found.sort(
		(a, b) =>
			Number(a.outlook.states > memory) - Number(b.outlook.states > memory) || a.outlook.seconds - b.outlook.seconds,
	);
	const check = layoutCheck(resolved);
	const planned = new PlannedRanks(machine);
	const splits: Split[] = [];
	const ofKind = new Map<string, { counted: number; fits: boolean }>();
	const left = new Set(found);
	let fitting = 0;
	const count = async (wanted: (kind: { readonly counted: number; readonly fits: boolean }) => boolean) => {
		for (const one of left) {
			const name = Object.values(one.kind).join(" ");
			const kind = ofKind.get(name) ?? { counted: 0, fits: false };
			ofKind.set(name, kind);
			if (!wanted(kind)) continue;
			left.delete(one);
			const configuration = check(one.layout);
			if (configuration === null) continue;
			const split = await bestOf(one.layout, configuration, planned);
			splits.push(split);
			kind.counted++;
			kind.fits ||= split.fits;
			fitting += Number(split.fits);
		}
	};
	await count((kind) => kind.counted < counted.ofKind);
	await count((kind) => !kind.fits && kind.counted < counted.unfit);
	await count(() => splits.length < counted.all || (fitting < counted.fitting && splits.length < counted.most));
	splits.sort(
		(a, b) => Number(b.fits) - Number(a.fits) || b.tokensPerSecond - a.tokensPerSecond || ranksOf(a) - ranksOf(b),
	);
	return { splits, layouts: splits.length + left.size };
}

/** Devices that a layout uses. */
function ranksOf({ kind, encoderRanks, languageRanks }: Split): number {
	return kind.modules === "disjoint" ? encoderRanks + languageRanks : languageRanks;
}

/** A layout as it is where that fits, or with its layers recomputed. */
async function bestOf(layout: LayoutFlags, c: TrainingConfiguration, planned: PlannedRanks): Promise<Split> {
	const { memoryBytes } = planned.machine;
	const kept = await splitOf(layout, c, planned);
	if (kept.fits || kept.states > memoryBytes! || c.recomputeGranularity !== null) return kept;
	const again: TrainingConfiguration = {
		...c,
		recomputeGranularity: recomputing["recompute-granularity"],
		recomputeMethod: recomputing["recompute-method"],
		recomputeNumLayers: recomputing["recompute-num-layers"],
	};
	const recomputed = await splitOf({ ...layout, ...recomputing }, again, planned);
	return recomputed.fits ? recomputed : kept;
}

async function splitOf(layout: LayoutFlags, c: TrainingConfiguration, ranks: PlannedRanks): Promise<Split> {
	const { machine } = ranks;
	const planned: PlannedActor[] = [];
	for (const { actor, ranks: own } of actorRanks(c)) {
		planned.push({ actor, plan: await ranks.plan(c, actor, own[0]!), ranks: own.length });
	}
	const conditions = conditionsOf(c, machine);
	const step = estimateStep(planned, conditions);
	const peak = Math.max(...planned.map(({ plan }) => plan.memory.peak));
	const topology = topologyOf(c);
	const communication = planned
		.map(({ plan }) => trafficOf(plan, microbatchesOf(c), machine))
		.map((traffic) => ({
			bytes: traffic.reduce((sum, { bytes }) => sum + bytes, 0),
			seconds: traffic.reduce((sum, { seconds }) => sum + seconds, 0),
		}))
		.toSorted((a, b) => b.seconds - a.seconds)[0]!;
	return {
		layout,
		kind: kindOf(c),
		encoderRanks: topology.encoders.reduce((sum, { size }) => sum + size, 0),
		languageRanks: topology.language.size,
		tokensPerSecond: (c.globalBatchSize * c.seqLength) / step.seconds,
		step,
		peak,
		states: Math.max(...planned.map(({ plan: { memory } }) => memory.peak - memory.activations)),
		fits: machine.memoryBytes === null || peak <= machine.memoryBytes,
		communication,
		bound: boundOf(planned, step, conditions, machine.memoryBytes),
		reason: reasonOf(step, peak, machine.memoryBytes),
	};
}

/** A cache of rank plans: many layouts share an equal encoder or stage. */
class PlannedRanks {
	readonly #plans = new Map<string, Promise<RankPlan>>();

	constructor(readonly machine: Machine) {}

	plan(c: TrainingConfiguration, actor: Actor, rank: number): Promise<RankPlan> {
		const { colocated } = topologyOf(c);
		const encoder = [c.encoderTp, c.encoderDp, c.encoderPp];
		const language = [c.llmTp, c.llmDp, c.llmEp, c.llmPp, c.hybridLayerPattern];
		// How far an encoder of its own runs ahead depends on the pipeline.
		const own =
			typeof actor === "string"
				? [...encoder, c.llmDp, c.llmPp, c.hybridLayerPattern]
				: [...language, actor, ...(colocated ? encoder : [])];
		const key = `${actor} ${c.recomputeGranularity} ${own.join(" ")}`;
		if (!this.#plans.has(key)) this.#plans.set(key, planRank(c, rank, this.machine));
		return this.#plans.get(key)!;
	}
}

/** The largest cost of the slowest module. */
function reasonOf({ modules, limitedByCores }: StepEstimate, peak: number, memory: number | null): string {
	if (memory !== null && peak > memory) return `needs ${(peak / 2 ** 30).toFixed(1)} GiB on a rank`;
	if (limitedByCores) return "fewer cores than ranks";
	const byIdle = modules.toSorted((a, b) => a.idle - b.idle);
	const slowest = byIdle[0]!;
	const most = byIdle.at(-1)!;
	const update = slowest.gradients + slowest.optimizer;
	const passes = slowest.forward + slowest.backward;
	const share = update > passes ? ", more in its update than in a microbatch" : "";
	const waits = modules.length > 1 ? `; ${nameOf(most.module)} idles ${(100 * most.idle).toFixed(0)} %` : "";
	return `${nameOf(slowest.module)} works ${(100 - 100 * slowest.idle).toFixed(0)} %${share}${waits}`;
}

/** Such as "the encoder" or "stage 1". */
function nameOf(module: string): string {
	const stage = /stage \d+$/.exec(module)?.[0];
	if (stage !== undefined) return stage;
	if (module.includes("+")) return "every rank";
	return module === "language" ? "the language model" : "the encoder";
}
