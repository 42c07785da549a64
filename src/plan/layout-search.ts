/** `mimo plan --split`: searches the layouts of a run on N devices, most tokens a second first. */
import { parsePattern } from "../config/hybrid-pattern.ts";
import type { ResolvedConfiguration } from "../config/resolve.ts";
import type { Key, TrainingConfiguration } from "../config/schema.ts";
import { mockImage } from "../data/mock.ts";
import { countFlopsPerToken } from "../models/language/counts.ts";
import { hybridConfig } from "../models/language/from-configuration.ts";
import { kinds } from "../models/language/kinds/index.ts";
import { hybridParameters } from "../models/language/names.ts";
import { imageCost } from "../models/vit/tower.ts";
import { topologyOf } from "../parallel/index.ts";
import type { Actor } from "../schedule/actions.ts";
import { elementCount } from "../tensor/index.ts";
import { encodersOf } from "../train/from-configuration.ts";
import { boundOf, estimateStep, type PlannedActor, type StepBound, type StepEstimate } from "./estimate.ts";
import {
	kindOf,
	type LayoutFlags,
	type LayoutKind,
	layoutCheck,
	layouts,
	type UncheckedLayout,
} from "./layout-candidates.ts";
import { planRank, type RankPlan } from "./rank-plan.ts";
import { microbatchesOf } from "./rank-run.ts";
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

// A rough estimate of a layout's memory and step time from sizes alone. It only decides which layouts `mimo plan --split` plans
// exactly when there are too many to plan all; no printed number comes from it.

interface RoughEstimate {
	/** Bytes of parameters, gradients and optimizer on a rank of the language model. */
	readonly states: number;
	/** Seconds of a step. */
	readonly seconds: number;
}

/** Bytes of a parameter in bf16 with its fp32 gradient, and of its master and moments, which replicas may share. */
const [resident, optimizer] = [6, 12];

/** Estimates layouts of one configuration. */
function roughEstimateOf(
	c: TrainingConfiguration,
	{ rates, ranksPerHost }: Machine,
): (layout: UncheckedLayout) => RoughEstimate {
	const specs = hybridParameters(hybridConfig(c));
	const elements = (experts: boolean) =>
		specs
			.filter((spec) => (spec.experts ?? 1) > 1 === experts)
			.reduce((sum, { shape, experts: copies }) => sum + elementCount(shape) * (copies ?? 1), 0);
	const [dense, expertElements] = [elements(false), elements(true)];
	const { forwardBackward } = countFlopsPerToken(c);
	const { grid, tokens: imageTokens } = mockImage(c);
	const [vision] = encodersOf(c);
	const images = vision ? imageCost(vision.parts, grid, vision.frozen.tower) : 0;
	const tokens = c.microBatchSize * c.seqLength;
	const lanes = c.globalBatchSize / c.microBatchSize;
	const layers = parsePattern(c.hybridLayerPattern).segments.flat(2);
	const expertLayers = layers.filter((kind) => kinds[kind].routes).length;
	const speed = (ranks: number) => (ranks > ranksPerHost ? rates.between : rates.inside).bytes;
	return ({ kind, encoder, language }) => {
		const { tensor, data, expert } = language;
		const { stages, virtualStages } = kind;
		const microbatches = lanes / data;
		const own = { dense: dense / (tensor * stages), expert: expertElements / (expert * stages) };
		const shared = c.useDistributedOptimizer;
		const copies = { dense: shared ? data : 1, expert: shared ? (tensor * data) / expert : 1 };
		const states =
			own.dense * (resident + optimizer / copies.dense) + own.expert * (resident + optimizer / copies.expert);
		const row = 2 * c.hiddenSize;
		const tensorBytes = tensor > 1 ? 4 * layers.length * tokens * row * (1 - 1 / tensor) : 0;
		const rows = (tokens / tensor) * c.moeRouterTopk;
		const expertBytes = 4 * expertLayers * rows * row * (1 - 1 / expert);
		const pass =
			((tokens * forwardBackward) / tensor / rates.product +
				tensorBytes / speed(tensor) +
				expertBytes / speed(Math.max(tensor, expert))) /
			stages;
		const gradients = (6 * (own.dense + own.expert)) / speed(tensor * data);
		const languageSeconds = (microbatches + (stages - 1) / virtualStages) * pass + gradients;
		const apart = kind.modules === "disjoint";
		// Of an encoder's tensor-parallel ranks one sends the rows.
		const edge = apart ? (imageTokens * row * encoder.tensor) / rates.between.bytes : 0;
		const encoderSeconds =
			encoder.ranks > 0 ? (c.globalBatchSize * (images / rates.product + edge)) / encoder.ranks : 0;
		// Breaks ties between layouts with an equally slow slower module by the faster module.
		const [more, less] = [Math.max(languageSeconds, encoderSeconds), Math.min(languageSeconds, encoderSeconds)];
		return { states, seconds: apart ? more + less / 16 : more + less };
	};
}
