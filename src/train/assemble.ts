/**
 * Assembles one rank of a run from the run's modules and their layout: the rank's parts of the modules, their groups,
 * the edges between them, the passes and the optimizer. The language model alone, both modules in one process, on the
 * same ranks or on ranks of their own differ in the topology alone.
 */
import { firstCopyCounts } from "../checkpoint/gathered-store.ts";
import type { ElasticConfig } from "../elastic/config.ts";
import { drawFor } from "../elastic/draws.ts";
import { ElasticRouter } from "../elastic/elastic-router.ts";
import type { Draw } from "../elastic/router-network.ts";
import { routerPrefix } from "../elastic/router-parameters.ts";
import type { HybridConfig } from "../models/hybrid/config.ts";
import { languageModelPrefix } from "../models/hybrid/layer-places.ts";
import { HybridModel } from "../models/hybrid/model.ts";
import { wordEmbedding } from "../models/hybrid/names.ts";
import { blocksOf, type Segment, segmentsOfStage, wholeModel } from "../models/hybrid/segments.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import { type EncoderConfig, EncoderModule } from "../models/vision/encoder.ts";
import { AdamW, type AdamWOptions } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { DataParallel } from "../parallel/data-parallel.ts";
import { Edge, type EdgeOptions } from "../parallel/edge.ts";
import { type EdgeLayout, ranksOf } from "../parallel/edge-layout.ts";
import type { ExpertCapacity } from "../parallel/expert-capacity.ts";
import type { Grid } from "../parallel/grid.ts";
import { type Group, groupOfOne } from "../parallel/group.ts";
import { type ModuleGroups, moduleGroups } from "../parallel/module-groups.ts";
import type { BucketSize } from "../parallel/parameter-set.ts";
import type { Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import type { Chunk } from "../schedule/actions.ts";
import { inFlight } from "../schedule/rank-actions.ts";
import type { FloatDtype } from "../tensor/tensor.ts";
import type { DistillationOptions, Teacher } from "./distillation.ts";
import { FeaturePrefetch, type PrefetchOptions } from "./feature-prefetch.ts";
import { sharingLanes } from "./image-deal.ts";
import { lossNames } from "./loss-names.ts";
import { type Participation, sawImages } from "./participation.ts";
import { RankPasses } from "./rank-passes.ts";
import type { TrainingState } from "./step.ts";

/** The modules that a run trains, and the options of its training. */
export interface RunSpecification {
	/** null: the language model alone. */
	readonly encoder: EncoderConfig | null;
	readonly language: HybridConfig;
	/** Runs of layers that a pipeline stage passes at once, in order, a multiple of the stages; default: one, all layers. */
	readonly segments?: readonly Segment[];
	/** Microbatches that pass a stage's segment before its next one has its turn; default: as many as stages. */
	readonly microbatchGroup?: number | null;
	/** The language model is an elastic parent; absent or null: it is not. */
	readonly elastic?: ElasticSpecification | null;
	/** The language model learns from a teacher of the same sizes; absent or null: from labels alone. */
	readonly distillation?: DistillationOptions | null;
	/** Stands for image rows in the text; null without an encoder. */
	readonly imageTokenId: number | null;
	readonly frozen: { readonly tower: boolean; readonly projector: boolean; readonly language: boolean };
	readonly adam: AdamWOptions;
	readonly clipGrad: number;
	readonly seed: number;
	/** Whether the language model's stages leave gradients of their weights for the time in which they wait; default: not. */
	readonly lateWeightGradients?: boolean;
	/** Passes of the language model take turns while experts' rows are exchanged; default: not. */
	readonly overlap?: { readonly earlyRelease: boolean } | null;
	/** ZeRO-1; default: not. */
	readonly distributedOptimizer?: boolean;
	/** Type in which gradients are summed over replicas; default fp32. */
	readonly gradientSums?: FloatDtype;
	/** Buckets of a module of so many replicas whose sums start during backward; null, and by default: after it, whole. */
	readonly buckets?: (module: Chunk["module"], replicas: number) => BucketSize | null;
	/** Whether the encoder's lanes encode what they have read, or share images by what they cost; default: what they read. */
	readonly encoderBalance?: "number" | "cost";
	/** Default: the exact gradient. */
	readonly participation?: Pick<Participation, "policy">;
	/** A frozen tower runs ahead; absent or null: it does not. */
	readonly prefetch?: PrefetchOptions | null;
	/** How many rows the experts of a rank have room for; default: as many as can come. */
	readonly expertCapacity?: ExpertCapacity;
	/** Experts' rows go once to each node of so many consecutive ranks; default, and null: to each expert by themselves. */
	readonly ranksPerNode?: number | null;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}

export interface ElasticSpecification {
	readonly config: ElasticConfig;
	/**
	 * Draws repeat after so many microbatches of a lane and are the same in all lanes, so that layouts of different lanes can
	 * be compared; default: every microbatch, and every set of lanes that shares experts, has its own.
	 */
	readonly period?: number;
	/** The draw of a microbatch in place of the random one, by iteration and microbatch of the lane. */
	readonly draw?: (iteration: number, microbatch: number) => Draw;
}

/** A module's part on this rank. */
interface Held<Module> {
	readonly module: Module;
	readonly groups: ModuleGroups;
	readonly replica: DataParallel;
}

export interface Run extends Disposable {
	readonly topology: Topology;
	/** This rank in the run, from 0. */
	readonly rank: number;
	readonly state: TrainingState;
	/** Parts of the modules on this rank, or null, and their groups. */
	readonly language: HybridModel | null;
	/** With the language model, where it has a frozen teacher, whose weights are to be loaded. */
	readonly teacher: HybridModel | null;
	/** With the language model, where it is elastic. */
	readonly elastic: ElasticRouter | null;
	readonly encoder: EncoderModule | null;
	readonly groups: { readonly encoder: ModuleGroups | null; readonly language: ModuleGroups | null };
	/** Draws the initial weights: the same whatever the layout. */
	initialise(seed: number): void;
	/** This rank's part of every tensor of its modules, buffers included. The receiver disposes them. */
	logicalTensors(): Generator<LogicalTensor>;
	/** Whether this rank's part of a tensor is the one that counts: of equal copies only one does. */
	counts(tensor: LogicalTensor): boolean;
}

/** The order of a step but for its microbatches. */
export type Order = RankPasses["parts"]["shape"];

/** Every rank of the world calls this together. */
export async function assemble(specification: RunSpecification, topology: Topology, world: World): Promise<Run> {
	const everyone = await world.group(
		"world",
		Array.from({ length: topology.worldSize }, (_, rank) => rank),
	);
	const encoder = await holdEncoder(specification, topology, world);
	const language = await holdLanguage(specification, topology, world);
	const shape = shapeOf(specification, topology);
	const edges = await makeEdges(specification, topology, world, shape);
	const elastic = language && holdRouter(specification, topology, language);
	const teacher = language && holdTeacher(specification, language);
	const frozenTeacher = teacher?.teacher === "frozen" ? teacher.model : null;
	const held = [encoder, language, elastic].filter((one) => one !== null);
	const replicas = held.map(({ replica }) => replica);
	const scalars = new StepScalars(world.device);
	const optimizer = new AdamW(replicas, scalars, optimizerOptions(specification));
	const prefetch =
		encoder && specification.prefetch ? new FeaturePrefetch(encoder.module, specification.prefetch) : null;
	const passes = new RankPasses({
		encoder: encoder?.module ?? null,
		language: language?.module ?? null,
		imageTokenId: specification.imageTokenId,
		teacher,
		encoderLanes:
			encoder && specification.encoderBalance === "cost" ? sharingLanes(encoder.groups.replicas.dense, topology) : null,
		edges,
		shape,
		actor: language ? topology.language.coordinates(world.rank).pp : "encoder",
		prefetch,
		reduce: (module) => (module === "encoder" ? encoder : language)!.replica.startSums(),
	});
	const { clipGrad, seed, logNumZeros = false, logParametersNorm = false } = specification;
	return {
		topology,
		rank: world.rank,
		encoder: encoder?.module ?? null,
		language: language?.module ?? null,
		teacher: frozenTeacher,
		elastic: elastic?.module ?? null,
		groups: { encoder: encoder?.groups ?? null, language: language?.groups ?? null },
		state: {
			replicas,
			language: language && {
				model: language.module,
				routers: language.groups.tpDp,
				stages: language.groups.stages,
			},
			world: everyone,
			passes,
			elastic: elastic && { router: elastic.module, draw: elastic.draw },
			lossNames: lossNames(
				specification.language,
				specification.elastic?.config ?? null,
				(specification.distillation ?? null) !== null,
			),
			lossOwner: language && { group: language.groups.module, counts: ownsLoss(language) },
			optimizer,
			scalars,
			clipGrad,
			seed,
			participation: participationOf(specification, topology, encoder),
			logNumZeros,
			logParametersNorm,
		},
		initialise(seed) {
			for (const { module } of held) module.initialise(seed);
		},
		*logicalTensors() {
			for (const { module } of held) yield* module.logicalTensors();
		},
		counts: (tensor) =>
			tensor.name.startsWith(routerPrefix)
				? language!.groups.module.rank === 0
				: countsTensor(tensor, encoder, language),
		[Symbol.dispose]() {
			const modules = [...held.map(({ module }) => module), ...(frozenTeacher ? [frozenTeacher] : [])];
			for (const owned of [...(prefetch ? [prefetch] : []), optimizer, scalars, ...modules]) owned[Symbol.dispose]();
		},
	};
}

/** The router has a learning rate of its own. */
function optimizerOptions({ adam, elastic }: RunSpecification): AdamWOptions {
	if (!elastic) return adam;
	const { learningRateMultiplier } = elastic.config.router;
	return { ...adam, learningRateMultiplier: (name) => (name.startsWith(routerPrefix) ? learningRateMultiplier : 1) };
}

/** Whether gradients go back into the encoder. */
function trainsEncoder({ encoder, frozen }: RunSpecification): boolean {
	return encoder !== null && !(frozen.tower && frozen.projector);
}

async function holdEncoder(
	specification: RunSpecification,
	{ encoder: grid }: Topology,
	world: World,
): Promise<Held<EncoderModule> | null> {
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

async function holdLanguage(
	specification: RunSpecification,
	{ language: grid }: Topology,
	world: World,
): Promise<Held<HybridModel> | null> {
	const { language: config, frozen, segments = [wholeModel(config.pattern.length)] } = specification;
	if (!grid.contains(world.rank)) return null;
	const groups = await moduleGroups(world, grid, {
		experts: config.moe.experts,
		sequenceParallel: true,
		copies: config.tieWordEmbeddings || config.prediction !== null,
		...(specification.expertCapacity && { expertCapacity: specification.expertCapacity }),
		ranksPerNode: specification.ranksPerNode ?? null,
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

function holdTeacher(
	{ distillation = null }: RunSpecification,
	{ module: student }: Held<HybridModel>,
): Teacher | null {
	if (distillation === null) return null;
	if (distillation.teacher === "self") return { ...distillation, model: student };
	const { device, config, parallel, stages } = student;
	const segments = stages.map(({ segment }) => segment);
	const model = new HybridModel(device, { ...config, recompute: null }, { frozen: true, parallel, segments });
	return { ...distillation, model };
}

/** The router's weights are whole on every rank of the language model, and their gradients are sums over all of them. */
function holdRouter(
	{ elastic = null }: RunSpecification,
	{ language: grid }: Topology,
	{ module: model, groups }: Held<HybridModel>,
) {
	if (elastic === null) return null;
	const { config, period } = elastic;
	const module = new ElasticRouter(config, model);
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

export function shapeOf(specification: RunSpecification, { language, colocated }: Topology): Order {
	const { pipeline: stages } = language.shape;
	return {
		stages,
		virtualStages: (specification.segments?.length ?? 1) / stages,
		groupSize: specification.microbatchGroup ?? stages,
		lateWeightGradients: (specification.lateWeightGradients ?? false) && !specification.frozen.language,
		overlap: specification.overlap
			? { ...specification.overlap, exchanges: exchangesOf(specification, language) }
			: null,
		encoder: specification.encoder && { colocated, trains: trainsEncoder(specification) },
	};
}

/** Of every block of every segment: whether its experts' rows travel between ranks. */
function exchangesOf(
	{ language, segments = [wholeModel(language.pattern.length)] }: RunSpecification,
	{ shape }: Grid,
) {
	const travels = shape.expert * shape.expertTensor > 1;
	return segments.map((segment) =>
		blocksOf(language.blocks, segment).map(({ end }) => travels && language.pattern[end - 1] === "E"),
	);
}

/** Edges with an end on this rank, by the chunk of the language model that they enter. */
async function makeEdges(
	{ encoder, language }: RunSpecification,
	topology: Topology,
	world: World,
	shape: Order,
): Promise<Map<number, Edge>> {
	const edges = new Map<number, Edge>();
	const most = inFlight(shape);
	const common = { rank: world.rank, width: language.hiddenSize, inFlight: most };
	const images = topology.imageEdge;
	if (encoder !== null && images !== null && ranksOf(images).includes(world.rank)) {
		const groups = await waysOf(world, "image_rows", images);
		edges.set(
			0,
			new Edge(world.device, { ...common, layout: images, groups, dtype: encoder.tower.dtype, counted: true }),
		);
	}
	const { stages, virtualStages } = shape;
	if (stages === 1 || !topology.language.contains(world.rank)) return connected(edges);
	const ends = topology.language.coordinates(world.rank);
	const line = Array.from({ length: stages }, (_, stage) => topology.stageEdge(stage));
	const pipeline = { from: line.map(({ from }) => [from[ends.dp]![ends.tp]!]), to: [] };
	const groups = await waysOf(world, "hidden_states", pipeline);
	for (let chunk = 1; chunk < stages * virtualStages; chunk++) {
		const layout = line[(chunk - 1) % stages]!;
		if (!ranksOf(layout).includes(world.rank)) continue;
		const options: EdgeOptions = { ...common, layout, groups, dtype: language.dtype, counted: false };
		edges.set(chunk, new Edge(world.device, options));
	}
	return connected(edges);
}

function connected(edges: Map<number, Edge>): Map<number, Edge> {
	for (const edge of edges.values()) edge.connect();
	return edges;
}

/**
 * One group for each direction, so that a row on its way forward and a gradient on its way back do not wait for each
 * other.
 */
async function waysOf(world: World, name: string, layout: EdgeLayout): Promise<EdgeOptions["groups"]> {
	const ranks = ranksOf(layout);
	if (ranks.length === 1) return null;
	const make = (way: string): Promise<Group> => world.group(`edge.${name}.${way}`, ranks);
	return { forward: await make("forward"), backward: await make("backward") };
}

/** Ranks with a head hold the losses; of those that hold the same, the first tensor-parallel one counts. */
function ownsLoss({ module, groups }: Held<HybridModel>): boolean {
	return groups.model.tp.rank === 0 && module.stages.some(({ segment }) => segment.hasHead);
}

function participationOf(
	{ participation: wanted }: RunSpecification,
	topology: Topology,
	encoder: Held<EncoderModule> | null,
): Participation | null {
	if (topology.encoder === null || wanted === undefined) return null;
	return {
		policy: wanted.policy,
		ranks: topology.encoder.lanes,
		replica: encoder?.replica ?? null,
		// Tensor-parallel ranks see the same images.
		votes: encoder?.groups.model.tp.rank === 0 ? sawImages : () => 0,
	};
}

function countsTensor(
	tensor: LogicalTensor,
	encoder: Held<EncoderModule> | null,
	language: Held<HybridModel> | null,
): boolean {
	const held = tensor.name.startsWith(languageModelPrefix) ? language! : (encoder ?? language)!;
	const { replicas, model } = held.groups;
	const copies = held.replica.groups.copies;
	if (tensor.name === wordEmbedding && copies !== null && copies.rank !== 0) return false;
	return firstCopyCounts({ ...replicas, tensor: model.tp })(tensor);
}

/** The ranks that decode with this one. */
export function decodingRanks({ state, rank }: Run): { readonly group: Group; readonly stages: Group } {
	const alone = groupOfOne("no language model", rank);
	return { group: state.language?.routers ?? alone, stages: state.language?.stages ?? alone };
}

/** Whether this rank prints and logs: the last one, as in Megatron. */
export function reports({ topology, rank }: Pick<Run, "topology" | "rank">): boolean {
	return rank === topology.worldSize - 1;
}
