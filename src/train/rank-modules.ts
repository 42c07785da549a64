/** Builds a rank's part of each module with its process groups and gradient reduction. */
import { HybridModel } from "../models/language/model.ts";
import { rereadsEmbedding } from "../models/language/names.ts";
import { type PipelineSegment, segmentsOf, segmentsOfStage, wholeModel } from "../models/language/pipeline-segments.ts";
import type { Module } from "../models/module.ts";
import type { MatrixOptions } from "../models/parameter-spec.ts";
import { EncoderModule, type EncoderParts } from "../models/vision/encoder.ts";
import {
	type BucketSize,
	DataParallel,
	type Grid,
	type Group,
	type ModuleGroups,
	moduleGroups,
	type Topology,
	type World,
} from "../parallel/index.ts";
import type { RunSpecification } from "./run-specification.ts";

/** This rank's part of a module. */
export interface HeldModule<Own extends Module> {
	readonly name: string;
	readonly module: Own;
	readonly groups: ModuleGroups;
	readonly replica: DataParallel;
}

/** How a module's parameters lie in buffers. */
interface BufferOptions {
	readonly buckets?: BucketSize;
	readonly matrices: MatrixOptions | null;
}

/** How a rank's part of a module is built. */
interface Blueprint<Own extends Module> {
	/** Options of its process groups. */
	readonly groups: Parameters<typeof moduleGroups>[2];
	readonly open: (groups: ModuleGroups, buffers: BufferOptions) => Own;
}

/** This rank's part of a module on `grid`; null: the grid does not contain the rank. */
async function hold<Own extends Module>(
	specification: RunSpecification,
	grid: Grid,
	world: World,
	{ groups: wanted, open }: Blueprint<Own>,
): Promise<HeldModule<Own> | null> {
	if (!grid.contains(world.rank)) return null;
	const groups = await moduleGroups(world, grid, wanted);
	const buckets = specification.buckets?.(grid.name, groups.replicas.dense.size) ?? null;
	const { muon: matrices = null } = specification;
	const module = open(groups, { matrices, ...(buckets && { buckets }) });
	return { name: grid.name, module, groups, replica: replicaOf(specification, module, groups, buckets !== null) };
}

/** This rank's encoders. */
export async function holdEncoders(
	specification: RunSpecification,
	topology: Topology,
	world: World,
): Promise<HeldModule<EncoderModule>[]> {
	const held = [];
	for (const [index, encoder] of specification.encoders.entries()) {
		const one = await hold(specification, topology.encoders[index]!, world, {
			groups: { experts: 0, sequenceParallel: false },
			open: (groups, buffers) =>
				new EncoderModule(world.device, encoder.parts, {
					...buffers,
					frozenTower: encoder.frozen.tower,
					frozenProjector: encoder.frozen.projector,
					parallel: groups.model,
					segment: segmentOfStage(encoder.parts, groups.stages),
					replicas: replicasOf(groups),
				}),
		});
		if (one !== null) held.push(one);
	}
	return held;
}

/** The layers of an encoder's stage, in runs of equal lengths. Throws a RangeError where the tower has no stages. */
function segmentOfStage({ name, tower: { stream } }: EncoderParts, { rank, size }: Group): PipelineSegment {
	if (size > 1 && stream === null) throw new RangeError(`The tower of ${name} has no pipeline stages.`);
	return segmentsOf(new Array(size).fill((stream?.layers ?? 0) / size))[rank]!;
}

export async function holdLanguage(
	specification: RunSpecification,
	{ language: grid }: Topology,
	world: World,
): Promise<HeldModule<HybridModel> | null> {
	const { language: config, frozenLanguage, segments = [wholeModel(config.pattern.length)] } = specification;
	return await hold(specification, grid, world, {
		groups: {
			experts: config.moe.experts,
			sequenceParallel: true,
			copies: rereadsEmbedding(config),
			...(specification.expertCapacity && { expertCapacity: specification.expertCapacity }),
			...(specification.dispatcher && { dispatcher: specification.dispatcher }),
		},
		open: (groups, buffers) =>
			new HybridModel(world.device, config, {
				...buffers,
				frozen: frozenLanguage,
				parallel: groups.model,
				segments: segmentsOfStage(segments, groups.stages.rank, groups.stages.size),
				replicas: replicasOf(groups),
			}),
	});
}

function replicasOf({ replicas }: ModuleGroups) {
	return { dense: replicas.dense.size, expert: replicas.expert.size };
}

function replicaOf(
	{ distributedOptimizer, gradientSums }: RunSpecification,
	{ parameters }: Module,
	{ replicas, model }: ModuleGroups,
	overlaps: boolean,
): DataParallel {
	const options = { distributedOptimizer, overlaps, countsReplicated: model.tp.rank === 0, sumsIn: gradientSums };
	const replica = new DataParallel(parameters, replicas, options);
	replica.connect();
	return replica;
}
