/** What one rank of a language model's run holds: its part of the model, its optimizer, its place in the world. */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch, Microbatch } from "../data/microbatch.ts";
import { hybridConfig } from "../models/hybrid/from-configuration.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import { AdamW } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { DataParallel } from "../parallel/data-parallel.ts";
import { type ModuleGroups, moduleGroups } from "../parallel/module-groups.ts";
import { type Topology, topologyOf } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { gradientBuckets } from "./gradient-buckets.ts";
import { LanguageSchedule } from "./schedule.ts";
import type { TrainingRun } from "./training-run.ts";

export class LanguageRun implements TrainingRun<Microbatch> {
	readonly encoder = null;

	private constructor(
		readonly topology: Topology,
		readonly rank: number,
		readonly groups: ModuleGroups,
		readonly language: HybridModel,
		readonly state: TrainingRun<Microbatch>["state"],
		private readonly owned: readonly Disposable[],
	) {}

	/** Every rank of the world calls this together. */
	static async create(c: TrainingConfiguration, world: World): Promise<LanguageRun> {
		const { device } = world;
		const topology = topologyOf(c);
		const { language: grid } = topology;
		const everyone = await world.group("world", grid.ranks);
		const groups = await moduleGroups(world, grid, { experts: c.numExperts, sequenceParallel: true });
		const { replicas } = groups;
		const buckets = gradientBuckets(c, "language", replicas.dense.size);
		const model = new HybridModel(device, hybridConfig(c), {
			...(buckets && { buckets }),
			frozen: c.freezeLm,
			parallel: groups.model,
			replicas: { dense: replicas.dense.size, expert: replicas.expert.size },
		});
		const firstOfTp = groups.model.tp.rank === 0;
		const { useDistributedOptimizer } = c;
		const replica = new DataParallel(model.parameters, replicas, useDistributedOptimizer, firstOfTp, buckets !== null);
		const scalars = new StepScalars(device);
		const optimizer = new AdamW([replica], scalars, {
			beta1: c.adamBeta1,
			beta2: c.adamBeta2,
			epsilon: c.adamEps,
		});
		const state = {
			replicas: [replica],
			routers: [...model.routers.values()],
			routerGroup: groups.tpDp,
			world: everyone,
			schedule: new LanguageSchedule(model),
			countsLoss: firstOfTp,
			optimizer,
			scalars,
			clipGrad: c.clipGrad,
			seed: c.seed,
			logNumZeros: c.logNumZerosInGrad,
			logParametersNorm: c.logParamsNorm,
		};
		return new LanguageRun(topology, world.rank, groups, model, state, [optimizer, scalars, model]);
	}

	get model(): HybridModel {
		return this.language;
	}

	/** This rank's data lane, and how many there are. */
	get lane(): number {
		return this.topology.language.coordinates(this.rank).dp;
	}

	get lanes(): number {
		return this.topology.language.lanes;
	}

	batchOf({ text }: ImageTextMicrobatch): Microbatch {
		return text;
	}

	initialise(seed: number): void {
		this.language.initialise(seed);
	}

	logicalTensors(): Generator<LogicalTensor> {
		return this.language.logicalTensors();
	}

	/** After weights were loaded: fp32 masters follow them. */
	refreshMasters(): void {
		this.state.optimizer.refreshMasters();
	}

	[Symbol.dispose](): void {
		for (const one of this.owned) one[Symbol.dispose]();
	}
}
