/**
 * Builds one rank of a run: its parts of the modules, their process groups, the edges between modules and stages, the passes and
 * the optimizer. Every setup (the language model alone, both modules in one process, colocated or disjoint grids) takes this one
 * path and differs only in the topology.
 */

import { firstCopyCounts } from "../checkpoint/index.ts";
import { routerPrefix } from "../elastic/router/parameters.ts";
import type { ElasticRouter } from "../elastic/router/router.ts";
import { kinds } from "../models/language/kinds/index.ts";
import { languageModelPrefix } from "../models/language/layer-numbering.ts";
import type { HybridModel } from "../models/language/model.ts";
import { wordEmbedding } from "../models/language/names.ts";
import { blocksOf, wholeModel } from "../models/language/pipeline-segments.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import { AdamW, type AdamWOptions } from "../optim/adamw.ts";
import { StepScalars } from "../optim/step-scalars.ts";
import {
	Edge,
	type EdgeLayout,
	type EdgeOptions,
	type Grid,
	type Group,
	groupOfOne,
	type ModuleGroups,
	ranksOf,
	type Topology,
	type World,
} from "../parallel/index.ts";
import { inFlight } from "../schedule/rank-actions.ts";
import { lossNames } from "./loss-names.ts";
import { type Participation, sawImages } from "./participation.ts";
import { type HeldModule, holdEncoder, holdLanguage, holdRouter, holdTeacher } from "./rank-modules.ts";
import { RankPasses } from "./rank-passes.ts";
import type { RunSpecification } from "./run-specification.ts";
import type { TrainingState } from "./step.ts";

export interface Run extends Disposable {
	readonly topology: Topology;
	/** Whether guests want to know a step's microbatches in the step before. */
	readonly readsAhead: boolean;
	/** This rank in the run, from 0. */
	readonly rank: number;
	readonly state: TrainingState;
	/** This rank's part of each module, null on ranks without it, and the module's process groups. */
	readonly language: HybridModel | null;
	/** The frozen teacher of the language model, whose weights the caller loads; null without one. */
	readonly teacher: HybridModel | null;
	/** The router of an elastic language model; null if the model is not elastic or not on this rank. */
	readonly elastic: ElasticRouter | null;
	readonly encoder: EncoderModule | null;
	readonly groups: { readonly encoder: ModuleGroups | null; readonly language: ModuleGroups | null };
	/** Draws the initial weights from `seed`; the layout does not change them. */
	initialise(seed: number): void;
	/** This rank's part of every tensor of its modules, buffers included. The caller disposes them. */
	logicalTensors(): Generator<LogicalTensor>;
	/** Whether this rank's copy of a tensor part is the one to save or sum; exactly one of equal copies is. */
	counts(tensor: LogicalTensor): boolean;
}

/** A step's schedule, without the number of microbatches. */
export type StepShape = RankPasses["parts"]["shape"];

/** Collective over the world. */
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
	const guests = (specification.guests ?? [])
		.map((guest) => guest.open({ topology, encoder }))
		.filter((guest) => guest !== null);
	const passes = new RankPasses({
		encoder: encoder?.module ?? null,
		language: language?.module ?? null,
		imageTokenId: specification.imageTokenId,
		teacher,
		edges,
		shape,
		actor: language ? topology.language.coordinates(world.rank).pp : "encoder",
		guests,
		reduce: (module) => (module === "encoder" ? encoder : language)!.replica.startSums(),
	});
	const modules = { encoder, language, elastic };
	const state = stateOf(specification, topology, modules, { world: everyone, replicas, passes, optimizer, scalars });
	return {
		topology,
		readsAhead: specification.guests?.some(({ readsAhead }) => readsAhead) ?? false,
		rank: world.rank,
		encoder: encoder?.module ?? null,
		language: language?.module ?? null,
		teacher: frozenTeacher,
		elastic: elastic?.module ?? null,
		groups: { encoder: encoder?.groups ?? null, language: language?.groups ?? null },
		state,
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
			for (const owned of [...guests, optimizer, scalars, ...modules]) owned[Symbol.dispose]?.();
		},
	};
}

interface RankModules {
	readonly encoder: HeldModule<EncoderModule> | null;
	readonly language: HeldModule<HybridModel> | null;
	readonly elastic: ReturnType<typeof holdRouter>;
}

/** The training state of a rank: `parts` of it, and the rest as the specification and the rank's modules say. */
function stateOf(
	specification: RunSpecification,
	topology: Topology,
	{ encoder, language, elastic }: RankModules,
	parts: Pick<TrainingState, "world" | "replicas" | "passes" | "optimizer" | "scalars">,
): TrainingState {
	const { clipGrad, seed, logNumZeros = false, logParametersNorm = false } = specification;
	const distilled = (specification.distillation ?? null) !== null;
	return {
		...parts,
		language: language && {
			model: language.module,
			routers: language.groups.tpDp,
			stages: language.groups.stages,
		},
		elastic: elastic && { router: elastic.module, draw: elastic.draw },
		lossNames: lossNames(specification.language, specification.elastic?.config ?? null, distilled),
		lossOwner: language && { group: language.groups.module, counts: ownsLoss(language) },
		lossMean: specification.lossMean ?? "tokens",
		lanes: topology.language.lanes,
		clipGrad,
		seed,
		participation: participationOf(specification, topology, encoder),
		logNumZeros,
		logParametersNorm,
	};
}

/** The optimizer's options; the elastic router has its own learning-rate multiplier. */
function optimizerOptions({ adam, elastic }: RunSpecification): AdamWOptions {
	if (!elastic) return adam;
	const { learningRateMultiplier } = elastic.config.router;
	return { ...adam, learningRateMultiplier: (name) => (name.startsWith(routerPrefix) ? learningRateMultiplier : 1) };
}

/** Whether gradients go back into the encoder. */
function trainsEncoder({ encoder, frozen }: RunSpecification): boolean {
	return encoder !== null && !(frozen.tower && frozen.projector);
}

export function shapeOf(specification: RunSpecification, { language, colocated }: Topology): StepShape {
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

/** [chunk][block]: whether the block sends experts' rows to other ranks. */
function exchangesOf(
	{ language, segments = [wholeModel(language.pattern.length)] }: RunSpecification,
	{ shape }: Grid,
) {
	const travels = shape.expert * shape.expertTensor > 1;
	return segments.map((segment) =>
		blocksOf(language.blocks, segment).map(({ end }) => travels && kinds[language.pattern[end - 1]!].routes),
	);
}

/** Edges with an end on this rank, by the chunk of the language model that they enter. */
async function makeEdges(
	{ encoder, language }: RunSpecification,
	topology: Topology,
	world: World,
	shape: StepShape,
): Promise<Map<number, Edge>> {
	const edges = new Map<number, Edge>();
	const most = inFlight(shape);
	const common = { rank: world.rank, width: language.hiddenSize, inFlight: most };
	const images = topology.imageEdge;
	if (encoder !== null && images !== null && ranksOf(images).includes(world.rank)) {
		const groups = await directionGroups(world, "image_rows", images);
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
	const groups = await directionGroups(world, "hidden_states", pipeline);
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

/** One group for each direction, so that rows sent forward and gradients sent back do not wait for each other. */
async function directionGroups(world: World, name: string, layout: EdgeLayout): Promise<EdgeOptions["groups"]> {
	const ranks = ranksOf(layout);
	if (ranks.length === 1) return null;
	const make = (way: string): Promise<Group> => world.group(`edge.${name}.${way}`, ranks);
	return { forward: await make("forward"), backward: await make("backward") };
}

/** Whether this rank counts the losses: of the ranks with the output layer, the first of each tensor-parallel group. */
function ownsLoss({ module, groups }: HeldModule<HybridModel>): boolean {
	return groups.model.tp.rank === 0 && module.chunks.some(({ segment }) => segment.hasHead);
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
		// Tensor-parallel ranks see the same images, so one of them votes.
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

/** The groups over which this rank decodes. */
export function decodingRanks({ state, rank }: Run): { readonly group: Group; readonly stages: Group } {
	const alone = groupOfOne("no language model", rank);
	return { group: state.language?.routers ?? alone, stages: state.language?.stages ?? alone };
}

/** Whether this rank prints and writes logs: the last rank, as in Megatron. */
export function isReportingRank({ topology, rank }: Pick<Run, "topology" | "rank">): boolean {
	return rank === topology.worldSize - 1;
}
