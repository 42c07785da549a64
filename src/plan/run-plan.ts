/** Plans a run: memory and work of one rank of each module or stage, traffic, and the time of a step. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { fullestSample, patchCount } from "../data/mock.ts";
import type { DeviceKind } from "../native/library.ts";
import { type Grid, topologyOf } from "../parallel/index.ts";
import { type Actor, encoderActor, type ScheduleShape } from "../schedule/actions.ts";
import { shapeOf } from "../train/assemble.ts";
import { specificationOf } from "../train/from-configuration.ts";
import { boundOf, estimateStep, type StepBound, type StepConditions, type StepEstimate } from "./estimate.ts";
import { planRank, type RankMemoryPlan, type RankPlan } from "./rank-plan.ts";
import { microbatchesOf } from "./rank-run.ts";
import { networkBytes, type Rates, spansHosts, transferSeconds } from "./rates.ts";
import type { Transfer } from "./simulated-group.ts";

export interface Machine {
	readonly rates: Rates;
	readonly kind: DeviceKind;
	/** Bytes of a rank's device; null: not limited. */
	readonly memoryBytes: number | null;
	/** Hosts hold this many consecutive ranks. */
	readonly ranksPerHost: number;
	/** Rows that the busiest rank's experts get, over those of an even routing. */
	readonly imbalance: number;
}

/** One rank's traffic over one group in a step. */
export interface GroupTraffic {
	readonly group: string;
	readonly members: number;
	readonly transfers: number;
	readonly bytes: number;
	/** Of these, to other hosts. */
	readonly networkBytes: number;
	/** Whether its ranks are on several hosts. */
	readonly betweenHosts: boolean;
	readonly seconds: number;
}

/** Ranks with the same work: the encoder's, or those of one stage of the language model. */
export interface ModulePlan {
	readonly actor: Actor;
	readonly plan: RankPlan;
	readonly firstRank: number;
	readonly ranks: number;
	/** Of a rank. */
	readonly memory: RankMemoryPlan;
	/** A rank's memory with every layer recomputed; null: the module has no layers of the language model. */
	readonly recomputed: RankMemoryPlan | null;
	/** A rank's memory with every weight training in place of low-rank adapters; null: the run has no adapters. */
	readonly withoutAdapters: RankMemoryPlan | null;
	/** Floating-point operations of all ranks in a step. */
	readonly flops: { readonly forward: number; readonly backward: number };
	readonly traffic: readonly GroupTraffic[];
}

export interface RunPlan {
	readonly worldSize: number;
	readonly microbatches: number;
	readonly tokens: number;
	readonly modules: readonly ModulePlan[];
	/** Patches of the packed sequence whose memory the modules' is; null: of mock data's. */
	readonly packedPatches: number | null;
	readonly step: StepEstimate;
	readonly bound: StepBound;
	/** Steps between copies of the training's state in the host's memory; null: none are made. */
	readonly keptInterval: number | null;
	/** Seconds that a step takes longer for its copies. */
	readonly keptSeconds: number;
	/** Whether another host keeps each copy too. */
	readonly replicated: boolean;
}

/** The actors of a configuration's step and their ranks, ascending. */
export function actorRanks(c: TrainingConfiguration): { readonly actor: Actor; readonly ranks: readonly number[] }[] {
	const topology = topologyOf(c);
	const { encoders, language } = topology;
	const stagesOf = (grid: Grid, actor: (stage: number) => Actor) =>
		Array.from({ length: grid.shape.pipeline }, (_, stage) => ({
			actor: actor(stage),
			ranks: grid.lanesOf(stage).flat(),
		}));
	const alone = encoders
		.filter((encoder) => !topology.shares(encoder))
		.flatMap((grid) => stagesOf(grid, (stage) => encoderActor(grid.name, stage, grid.shape.pipeline)));
	return [...alone, ...stagesOf(language, (stage) => stage)];
}

/** The order of a configuration's step. */
export function stepShape(c: TrainingConfiguration): ScheduleShape {
	return { ...shapeOf(specificationOf(c), topologyOf(c)), microbatches: microbatchesOf(c), forwardOnly: false };
}

export function conditionsOf(c: TrainingConfiguration, { rates, ranksPerHost }: Machine): StepConditions {
	const topology = topologyOf(c);
	const { language } = topology;
	/** The first stage that shares a lane of an encoder with another, by the encoder. */
	const firsts = new Map(
		topology.encoders
			.filter((encoder) => topology.shares(encoder))
			.map((encoder) => {
				const first = new Map<Actor, number>();
				for (let lane = 0; lane < encoder.lanes; lane++) {
					const stages = encoder.lane(lane, 0).map((rank) => language.coordinates(rank).pp);
					const least = Math.min(...stages.map((stage) => first.get(stage) ?? stage));
					for (const stage of stages) if (new Set(stages).size > 1) first.set(stage, least);
				}
				return [encoder.name, first];
			}),
	);
	return {
		rates,
		ranksPerHost,
		shape: stepShape(c),
		together: (module, actor) => {
			const first = firsts.get(module)?.get(actor);
			return first === undefined ? null : `stage ${first}`;
		},
	};
}

export async function planRun(c: TrainingConfiguration, machine: Machine): Promise<RunPlan> {
	const microbatches = microbatchesOf(c);
	const modules: ModulePlan[] = [];
	for (const { actor, ranks } of actorRanks(c)) {
		const rank = ranks[0]!;
		const plan = await planRank(c, rank, machine);
		modules.push({
			actor,
			plan,
			firstRank: rank,
			ranks: ranks.length,
			memory: plan.memory,
			recomputed: await recomputedMemory(c, rank, plan, machine),
			withoutAdapters: await fullyTrainedMemory(c, rank, plan, machine),
			flops: {
				forward: plan.phases.forward.flops * microbatches * ranks.length,
				backward: (plan.phases.backward.flops + plan.phases["weight gradient"].flops) * microbatches * ranks.length,
			},
			traffic: trafficOf(plan, microbatches, machine),
		});
	}
	const conditions = conditionsOf(c, machine);
	const step = estimateStep(modules, conditions);
	const packed = fullestSample(c);
	return {
		worldSize: topologyOf(c).worldSize,
		microbatches,
		tokens: c.globalBatchSize * c.seqLength,
		keptInterval: c.maxRestarts > 0 ? c.nonPersistentSaveInterval : null,
		keptSeconds: Math.max(...modules.map(({ memory }) => memory.kept)) / machine.rates.host,
		replicated: c.replication,
		modules,
		packedPatches: packed && patchCount(packed.grids),
		step,
		bound: boundOf(modules, step, conditions, machine.memoryBytes),
	};
}

/** The encoder keeps its activations. */
async function recomputedMemory(
	c: TrainingConfiguration,
	rank: number,
	plan: RankPlan,
	machine: Machine,
): Promise<RankMemoryPlan | null> {
	if (!plan.language) return null;
	if (c.recomputeGranularity === "full" && c.recomputeMethod === "uniform") return plan.memory;
	const recomputing: TrainingConfiguration = {
		...c,
		recomputeGranularity: "full",
		recomputeMethod: "uniform",
		recomputeNumLayers: 1,
	};
	return (await planRank(recomputing, rank, machine)).memory;
}

/** Memory of a rank if the weights trained instead of adapters; null: the rank's module has none. */
async function fullyTrainedMemory(
	c: TrainingConfiguration,
	rank: number,
	{ language }: RankPlan,
	machine: Machine,
): Promise<RankMemoryPlan | null> {
	const adapted = c.loraTargetModules.some((target) => target.startsWith("vision_"));
	if (c.loraRank === null || (!language && !adapted)) return null;
	return (await planRank({ ...c, loraRank: null }, rank, machine)).memory;
}

export function trafficOf(
	{ phases, overlapped }: RankPlan,
	microbatches: number,
	{ rates, ranksPerHost }: Machine,
): GroupTraffic[] {
	const all = [phases.forward, phases.backward, phases["weight gradient"]].flatMap(({ transfers }) => transfers);
	const passes = all.filter(({ kind }) => kind !== "receive");
	const ofStep = [
		...passes.map((transfer) => ({ ...transfer, calls: microbatches * transfer.calls })),
		...[...overlapped, ...phases.reduce.transfers, ...phases.update.transfers],
	];
	return [...Map.groupBy(ofStep, (transfer) => transfer.group)].map(([group, all]) => {
		const { ranks } = all[0]!;
		const total = (value: (transfer: Transfer) => number) =>
			all.reduce((sum, transfer) => sum + transfer.calls * value(transfer), 0);
		return {
			group,
			members: ranks.length,
			transfers: Math.ceil(total(() => 1)),
			bytes: total(({ bytes }) => bytes),
			networkBytes: total((transfer) => networkBytes(transfer, ranksPerHost)),
			betweenHosts: spansHosts(ranks, ranksPerHost),
			seconds: total((transfer) => transferSeconds(transfer, rates, ranksPerHost)),
		};
	});
}
