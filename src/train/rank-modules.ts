/** Builds a rank's part of each module with its process groups and gradient reduction. */
import { drawFor } from "../elastic/router/draws.ts";
import { ElasticRouter } from "../elastic/router/router.ts";
import { HybridModel } from "../models/language/model.ts";
import { segmentsOfStage, wholeModel } from "../models/language/pipeline-segments.ts";
import { EncoderModule } from "../models/vision/encoder.ts";
import { DataParallel, type ModuleGroups, moduleGroups, type Topology, type World } from "../parallel/index.ts";
import type { Teacher } from "./distillation.ts";
import type { RunSpecification } from "./run-specification.ts";

/** This rank's part of a module. */
export interface HeldModule<Module> {
	readonly module: Module;
	readonly groups: ModuleGroups;
	readonly replica: DataParallel;
}

export async function holdEncoder(
	specification: RunSpecification,
	{ encoder: grid }: Topology,
	world: World,
): Promise<HeldModule<EncoderModule> | null> {
	const { encoder: config, frozen } = specification;
	if (config === null || !grid?.contains(world.rank)) return null;
	const groups = await moduleGroups(world, grid, { experts: 0, sequenceParallel: false });
	const buckets = specification.buckets?.("encoder", groups.replicas.dense.size) ?? null;
	const module = new EncoderModule(world.device, config, {
		...(buckets && { buckets }),
		frozenTower: frozen.tower,
		frozenProjector: frozen.projector,
		parallel: groups.model,
		replicas: replicasOf(groups),
	});
	return { module, groups, replica: replicaOf(specification, module, groups, buckets !== null) };
}

export async function holdLanguage(
	specification: RunSpecification,
	{ language: grid }: Topology,
	world: World,
): Promise<HeldModule<HybridModel> | null> {
	const { language: config, frozen, segments = [wholeModel(config.pattern.length)] } = specification;
	if (!grid.contains(world.rank)) return null;
	const groups = await moduleGroups(world, grid, {
		experts: config.moe.experts,
		sequenceParallel: true,
		copies: config.tieWordEmbeddings || config.mtp !== null,
		...(specification.expertCapacity && { expertCapacity: specification.expertCapacity }),
		...(specification.dispatcher && { dispatcher: specification.dispatcher }),
	});
	const buckets = specification.buckets?.("language", groups.replicas.dense.size) ?? null;
	const module = new HybridModel(world.device, config, {
		...(buckets && { buckets }),
		frozen: frozen.language,
		parallel: groups.model,
		segments: segmentsOfStage(segments, groups.stages.rank, groups.stages.size),
		replicas: replicasOf(groups),
	});
	return { module, groups, replica: replicaOf(specification, module, groups, buckets !== null) };
}

export function holdTeacher(
	{ distillation = null }: RunSpecification,
	{ module: student }: HeldModule<HybridModel>,
): Teacher | null {
	if (distillation === null) return null;
	if (distillation.teacher === "self") return { ...distillation, model: student };
	const { device, config, parallel, chunks } = student;
	const segments = chunks.map(({ segment }) => segment);
	const model = new HybridModel(device, { ...config, recompute: null }, { frozen: true, parallel, segments });
	return { ...distillation, model };
}

/**
 * The elastic router. Its weights are replicated on every rank of the language model, and its gradients are summed over all of
 * them.
 */
export function holdRouter(
	{ elastic = null }: RunSpecification,
	{ language: grid }: Topology,
	{ module: model, groups }: HeldModule<HybridModel>,
) {
	if (elastic === null) return null;
	const { config, period } = elastic;
	const module = new ElasticRouter(config, model, groups.module.size);
	const ranks = { dense: groups.module, expert: groups.module, sequenceParallel: null, copies: null };
	const replica = new DataParallel(module.parameters, ranks, false, true);
	const sharing = groups.model.experts?.group ?? groups.model.tp;
	const lanes = period === undefined ? Math.min(...sharing.ranks.map((rank) => grid.coordinates(rank).dp)) : 0;
	const drawn = (iteration: number, microbatch: number) =>
		drawFor(config, { iteration, microbatch: microbatch % (period ?? Infinity), lanes }, module.parentBudget);
	return { module, replica, draw: elastic.draw ?? drawn };
}

function replicasOf({ replicas }: ModuleGroups) {
	return { dense: replicas.dense.size, expert: replicas.expert.size };
}

function replicaOf(
	{ distributedOptimizer = false, gradientSums }: RunSpecification,
	{ parameters }: EncoderModule | HybridModel,
	{ replicas, model }: ModuleGroups,
	overlaps: boolean,
): DataParallel {
	const replica = new DataParallel(
		parameters,
		replicas,
		distributedOptimizer,
		model.tp.rank === 0,
		overlaps,
		gradientSums,
	);
	replica.connect();
	return replica;
}
