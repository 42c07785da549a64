/**
 * Assembles one rank of a run from the run's modules and their layout: the rank's parts of the modules, their groups,
 * the edges between them, the passes and the optimizer. The language model alone, both modules in one process, on the
 * same ranks or on ranks of their own differ in the topology alone.
 */
import { firstCopyCounts } from "../checkpoint/gathered-store.ts";
import { routerPrefix } from "../elastic/router/parameters.ts";
import type { ElasticRouter } from "../elastic/router/router.ts";
import { languageModelPrefix } from "../models/hybrid/layer-numbering.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { wordEmbedding } from "../models/hybrid/names.ts";
import { blocksOf, wholeModel } from "../models/hybrid/segments.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import { AdamW, type AdamWOptions } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import { Edge, type EdgeOptions } from "../parallel/edge.ts";
import { type EdgeLayout, ranksOf } from "../parallel/edge-layout.ts";
import type { Grid } from "../parallel/grid.ts";
import { type Group, groupOfOne } from "../parallel/group.ts";
import type { ModuleGroups } from "../parallel/module-groups.ts";
import type { Topology } from "../parallel/topology.ts";
import type { World } from "../parallel/world.ts";
import { inFlight } from "../schedule/rank-actions.ts";
import { sharingLanes } from "./encoder-balance.ts";
import { FeaturePrefetch } from "./feature-prefetch.ts";
import { lossNames } from "./loss-names.ts";
import { type Participation, sawImages } from "./participation.ts";
import { type HeldModule, holdEncoder, holdLanguage, holdRouter, holdTeacher } from "./rank-modules.ts";
import { RankPasses } from "./rank-passes.ts";
import type { RunSpecification } from "./run-specification.ts";
import type { TrainingState } from "./step.ts";

export interface Run extends Disposable {
	readonly topology: Topology;
	/** This rank in the run, from 0. */
	readonly rank: number;
	readonly state: TrainingState;
	/** Parts of the modules on this rank, or null, and their groups. */
	readonly language: HybridModel | null;
	/** With the language model, where it has a frozen teacher, whose weights are to be loaded. */
	readonly teacher: HybridModel | null;
	/** The router of an elastic language model; null where this rank has no such model. */
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
function ownsLoss({ module, groups }: HeldModule<HybridModel>): boolean {
	return groups.model.tp.rank === 0 && module.stages.some(({ segment }) => segment.hasHead);
}

function participationOf(
	{ participation: wanted }: RunSpecification,
	topology: Topology,
	encoder: HeldModule<EncoderModule> | null,
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
	encoder: HeldModule<EncoderModule> | null,
	language: HeldModule<HybridModel> | null,
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
