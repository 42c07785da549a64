/** What one rank of a language model's run holds: its part of the model, its optimizer, its place in the world. */
import { dataLanes } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { Microbatch } from "../data/microbatch.ts";
import { hybridConfig } from "../models/hybrid/from-configuration.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { AdamW } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { DataParallel } from "../parallel/data-parallel.ts";
import type { Group } from "../parallel/group.ts";
import { moduleGroups } from "../parallel/module-groups.ts";
import { layOut, type Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { LanguageSchedule } from "./schedule.ts";
import type { TrainingState } from "./step.ts";

/** Grid of a run without an encoder. Weight shards run as extra data parallelism: they have lanes of their own. */
export function languageTopology(c: TrainingConfiguration): Topology {
	const language = { tensor: c.llmTp, data: dataLanes(c), expert: c.llmEp, expertTensor: c.llmExptTp };
	return layOut(null, language, false);
}

export class LanguageRun implements Disposable {
	private constructor(
		readonly world: Group,
		readonly model: HybridModel,
		readonly state: TrainingState<Microbatch>,
		/** This rank's data lane, and how many there are. */
		readonly lane: number,
		readonly lanes: number,
		/** Whether this rank prints and logs: the last one, as in Megatron. */
		readonly reports: boolean,
		private readonly owned: readonly Disposable[],
	) {}

	/** Every rank of the world calls this together. */
	static async create(c: TrainingConfiguration, world: World): Promise<LanguageRun> {
		const { device } = world;
		const { language: grid } = languageTopology(c);
		const everyone = await world.group("world", grid.ranks);
		const groups = await moduleGroups(world, grid, { experts: c.numExperts, sequenceParallel: true });
		const { replicas } = groups;
		const model = new HybridModel(device, hybridConfig(c), {
			frozen: false,
			parallel: groups.model,
			replicas: { dense: replicas.dense.size, expert: replicas.expert.size },
		});
		const firstOfTp = groups.model.tp.rank === 0;
		const replica = new DataParallel(model.parameters, replicas, c.useDistributedOptimizer, firstOfTp);
		const scalars = new StepScalars(device);
		const optimizer = new AdamW([replica], scalars, {
			beta1: c.adamBeta1,
			beta2: c.adamBeta2,
			epsilon: c.adamEps,
		});
		const state: TrainingState<Microbatch> = {
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
		const lane = grid.coordinates(world.rank).dp;
		const reports = world.rank === grid.size - 1;
		return new LanguageRun(everyone, model, state, lane, grid.lanes, reports, [optimizer, scalars, model]);
	}

	/** After weights were loaded: fp32 masters follow them. */
	refreshMasters(): void {
		this.state.optimizer.refreshMasters();
	}

	[Symbol.dispose](): void {
		for (const one of this.owned) one[Symbol.dispose]();
	}
}
