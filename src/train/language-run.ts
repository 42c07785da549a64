/** What one rank of a language model's run holds: its part of the model, its optimizer, its place in the world. */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { Microbatch } from "../data/microbatch.ts";
import { hybridConfig } from "../models/hybrid/from-configuration.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { AdamW } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { DataParallel } from "../parallel/data-parallel.ts";
import { moduleGroups } from "../parallel/module-groups.ts";
import type { Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { gradientBuckets } from "./gradient-buckets.ts";
import { LanguageSchedule } from "./schedule.ts";
import type { TrainingRun } from "./training-run.ts";

/** Every rank of the world calls this together. */
export async function languageRun(
	c: TrainingConfiguration,
	topology: Topology,
	world: World,
): Promise<TrainingRun<Microbatch> & { readonly language: HybridModel }> {
	const { device } = world;
	const { language: grid } = topology;
	const everyone = await world.group("world", grid.ranks);
	const groups = await moduleGroups(world, grid, { experts: c.numExperts, sequenceParallel: true });
	const { replicas } = groups;
	const buckets = gradientBuckets(c, "language", replicas.dense.size);
	const language = new HybridModel(device, hybridConfig(c), {
		...(buckets && { buckets }),
		frozen: c.freezeLm,
		parallel: groups.model,
		replicas: { dense: replicas.dense.size, expert: replicas.expert.size },
	});
	const { parameters } = language;
	const firstOfTp = groups.model.tp.rank === 0;
	const replica = new DataParallel(parameters, replicas, c.useDistributedOptimizer, firstOfTp, buckets !== null);
	replica.connect();
	const scalars = new StepScalars(device);
	const optimizer = new AdamW([replica], scalars, { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps });
	return {
		topology,
		rank: world.rank,
		groups,
		encoder: null,
		language,
		state: {
			replicas: [replica],
			routers: [...language.routers.values()],
			routerGroup: groups.tpDp,
			world: everyone,
			schedule: new LanguageSchedule(language),
			countsLoss: firstOfTp,
			optimizer,
			scalars,
			clipGrad: c.clipGrad,
			seed: c.seed,
			logNumZeros: c.logNumZerosInGrad,
			logParametersNorm: c.logParamsNorm,
		},
		batchOf: ({ text }) => text,
		initialise: (seed) => language.initialise(seed),
		logicalTensors: () => language.logicalTensors(),
		[Symbol.dispose]() {
			for (const owned of [optimizer, scalars, language]) owned[Symbol.dispose]();
		},
	};
}
