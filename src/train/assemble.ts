/**
 * Builds one rank of a run: its parts of the modules, their process groups, the edges between modules and stages, the passes and
 * the optimizer. Every setup (the language model alone, both modules in one process, colocated or disjoint grids) takes this one
 * path and differs only in the topology.
 */

import { firstCopyCounts } from "../checkpoint/index.ts";
import type { RankGuest } from "../guests/guest.ts";
import { guestsOfRun } from "../guests/index.ts";
import { kinds } from "../models/language/kinds/index.ts";
import type { HybridModel } from "../models/language/model.ts";
import { wordEmbedding } from "../models/language/names.ts";
import { blocksOf, wholeModel } from "../models/language/pipeline-segments.ts";
import { pooledCoefficient } from "../models/language/pooled-balancing.ts";
import type { Module } from "../models/module.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import { type EncoderModule, encoderPrefix } from "../models/vision/encoder.ts";
import { rowWidth } from "../models/vision/projector.ts";
import { Optimizer, type OptimizerOptions } from "../optim/optimizer.ts";
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
	visionModule,
	type World,
} from "../parallel/index.ts";
import { encoderActor } from "../schedule/actions.ts";
import type { HeldEdge } from "../schedule/execute.ts";
import { inFlight } from "../schedule/rank-actions.ts";
import type { Evaluations } from "./evaluate.ts";
import { languageModelLoss } from "./losses.ts";
import { type Participation, sawImages } from "./participation.ts";
import { type HeldModule, holdEncoders, holdLanguage } from "./rank-modules.ts";
import { type PooledStages, RankPasses } from "./rank-passes.ts";
import type { RunSpecification } from "./run-specification.ts";
import type { TrainingState } from "./step-state.ts";

export interface Run extends Disposable {
	readonly topology: Topology;
	/** Whether guests want to know a step's microbatches in the step before. */
	readonly readsAhead: boolean;
	/** This rank in the run, from 0. */
	readonly rank: number;
	readonly state: TrainingState;
	/** This rank's part of each module, null on ranks without it, and the module's process groups. */
	readonly language: HybridModel | null;
	/** This rank's guests. */
	readonly guests: readonly RankGuest[];
	/** The models that evaluations run. */
	readonly evaluations: Evaluations;
	/** The encoders of this rank, in the order of their grids. */
	readonly encoders: readonly HeldModule<EncoderModule>[];
	/** Process groups of the language model; null on ranks without it. */
	readonly languageGroups: ModuleGroups | null;
	/** The encoder that Megatron's flags describe. */
	readonly encoder: EncoderModule | null;
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
	const encoders = await holdEncoders(specification, topology, world);
	const language = await holdLanguage(specification, topology, world);
	const shape = shapeOf(specification, topology);
	const edges = await makeEdges(specification, topology, world, shape);
	const pooled = language && (await poolStages(specification, topology, world, shape, language.groups.tpDp));
	const modules = [...encoders, ...(language ? [language] : [])];
	const configured = guestsOfRun(specification.language, specification.guests ?? []);
	const { segments = [wholeModel(specification.language.pattern.length)] } = specification;
	const guests = configured
		.map((guest) => guest.open({ topology, encoders, language, segments }))
		.filter((guest) => guest !== null);
	const guestModules = guests.flatMap(({ modules = [] }) => modules);
	const ofGuests = guestModules.flatMap(({ module, trained }) => (trained ? [{ ...trained, module }] : []));
	const held = [...modules, ...ofGuests];
	const replicas = held.map(({ replica }) => replica);
	const scalars = new StepScalars(world.device);
	const optimizer = new Optimizer(replicas, scalars, optimizerOptions(specification, ofGuests));
	const own = topology.gridOf(world.rank);
	const { pp: stage } = own.coordinates(world.rank);
	const passes = new RankPasses({
		encoders,
		language: language?.module ?? null,
		placeholders: new Map(specification.encoders.map(({ parts, placeholderId }) => [parts.name, placeholderId])),
		edges,
		shape,
		actor: language ? stage : encoderActor(own.name, stage, own.shape.pipeline),
		pooled,
		guests,
		reduce: (name) => modules.find((one) => one.name === name)!.replica.startSums(),
	});
	const lossNames = [
		{ name: languageModelLoss },
		...configured.flatMap((guest) => guest.losses?.(specification.language) ?? []),
	];
	const state = stateOf(
		specification,
		topology,
		{ encoders, language, lossNames },
		{ world: everyone, replicas, passes, optimizer, scalars },
	);
	return {
		topology,
		readsAhead: configured.some(({ readsAhead }) => readsAhead),
		guests,
		evaluations: {
			whole: configured.every(({ evaluatedAlone = false }) => !evaluatedAlone),
			parts: configured.flatMap(({ evaluations = [] }) => evaluations),
		},
		rank: world.rank,
		encoders,
		languageGroups: language?.groups ?? null,
		encoder: encoders.find(({ name }) => name === visionModule)?.module ?? null,
		language: language?.module ?? null,
		state,
		initialise(seed) {
			for (const { module } of held) module.initialise(seed);
		},
		*logicalTensors() {
			for (const { module } of held) yield* module.logicalTensors();
		},
		counts: (tensor) =>
			ofGuests.find(({ prefix }) => tensor.name.startsWith(prefix))?.counts ?? countsTensor(tensor, modules),
		[Symbol.dispose]() {
			const all = [...held, ...guestModules.filter(({ trained }) => trained === null)].map(({ module }) => module);
			for (const owned of [...guests, optimizer, scalars, ...all]) owned[Symbol.dispose]?.();
		},
	};
}

interface RankModules {
	readonly encoders: readonly HeldModule<EncoderModule>[];
	readonly language: HeldModule<HybridModel> | null;
}

/** The training state of a rank: `parts` of it, and the rest as the specification and the rank's modules say. */
function stateOf(
	specification: RunSpecification,
	topology: Topology,
	{ encoders, language, lossNames }: RankModules & Pick<TrainingState, "lossNames">,
	parts: Pick<TrainingState, "world" | "replicas" | "passes" | "optimizer" | "scalars">,
): TrainingState {
	const { clipGrad, seed, logNumZeros = false, logParametersNorm = false } = specification;
	return {
		...parts,
		language: language && {
			model: language.module,
			routers: language.groups.tpDp,
			stages: language.groups.stages,
		},
		lossNames,
		lossOwner: language && { group: language.groups.module, counts: ownsLoss(language) },
		lossMean: specification.lossMean ?? "tokens",
		lanes: topology.language.lanes,
		clipGrad,
		seed,
		participation: participationOf(specification, topology, encoders),
		logNumZeros,
		logParametersNorm,
	};
}

/** The optimizer's options; encoders and modules of guests have learning-rate multipliers of their own. */
function optimizerOptions(
	{ adam, muon = null, encoders }: RunSpecification,
	ofGuests: readonly { readonly prefix: string; readonly learningRateMultiplier: number }[],
): OptimizerOptions {
	const ofEncoders = encoders.flatMap(({ parts, learningRateMultiplier = 1 }) =>
		learningRateMultiplier === 1 ? [] : [{ prefix: encoderPrefix(parts.name), learningRateMultiplier }],
	);
	const all = [...ofEncoders, ...ofGuests];
	const options = { ...adam, muon };
	if (all.length === 0) return options;
	const of = (name: string) => all.find(({ prefix }) => name.startsWith(prefix));
	return { ...options, learningRateMultiplier: (name) => of(name)?.learningRateMultiplier ?? 1 };
}

export function shapeOf(specification: RunSpecification, topology: Topology): StepShape {
	const { language, encoders } = topology;
	const { pipeline: stages } = language.shape;
	return {
		pipeline: language.name,
		stages,
		virtualStages: (specification.segments?.length ?? 1) / stages,
		groupSize: specification.microbatchGroup ?? stages,
		lateWeightGradients: (specification.lateWeightGradients ?? false) && !specification.frozenLanguage,
		overlap: specification.overlap
			? { ...specification.overlap, exchanges: exchangesOf(specification, language) }
			: null,
		encoders: specification.encoders.map(({ parts, frozen }, index) => ({
			name: parts.name,
			colocated: topology.shares(encoders[index]!),
			trains: Array.from(
				{ length: encoders[index]!.shape.pipeline },
				(_, stage, last = encoders[index]!.shape.pipeline - 1) => !(frozen.tower && (frozen.projector || stage < last)),
			),
		})),
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

/** Edges with an end on this rank: from the encoders, then from stage to stage. */
async function makeEdges(
	{ encoders, language }: RunSpecification,
	topology: Topology,
	world: World,
	shape: StepShape,
): Promise<HeldEdge[]> {
	const edges: HeldEdge[] = [];
	const common = { rank: world.rank, inFlight: inFlight(shape) };
	for (const [index, { encoder, layout }] of topology.featureEdges.slice(0, encoders.length).entries()) {
		const { dtype, stream } = encoders[index]!.parts.tower;
		const module = encoder.name;
		if (stream) {
			const layers = stream.layers / encoder.shape.pipeline;
			const width = (stage: number) => stream.widthBehind((stage + 1) * layers);
			edges.push(...(await stageEdges(encoder, world, { ...common, width, dtype, name: `${module}.stages` })));
		}
		if (!ranksOf(layout).includes(world.rank)) continue;
		const groups = await directionGroups(world, module, layout);
		const edge = new Edge(world.device, {
			...common,
			width: rowWidth(encoders[index]!.parts.projector),
			layout,
			groups,
			dtype,
			counted: true,
		});
		const from = { module, index: encoder.shape.pipeline - 1 };
		edges.push({ from, to: { module: shape.pipeline, index: 0 }, edge });
	}
	const { hiddenSize: width, dtype } = language;
	const rows = { ...common, width: () => width, dtype, name: shape.pipeline };
	return connected([...edges, ...(await stageEdges(topology.language, world, rows, shape.virtualStages))]);
}

/** Edges from stage to stage of a module with an end on this rank, not connected yet; `width`: behind a stage; `name`: of their groups. */
async function stageEdges(
	grid: Grid,
	world: World,
	{
		name,
		width,
		...rows
	}: Pick<EdgeOptions, "dtype" | "rank" | "inFlight"> & {
		readonly width: (stage: number) => number;
		readonly name: string;
	},
	virtualStages = 1,
): Promise<HeldEdge[]> {
	const { name: module } = grid;
	const { pipeline: stages } = grid.shape;
	if (stages === 1 || !grid.contains(world.rank)) return [];
	const ends = grid.coordinates(world.rank);
	const line = Array.from({ length: stages }, (_, stage) => grid.stageEdge(stage));
	const ofLane = ends.tp + grid.shape.tensor * ends.cp;
	const pipeline = { from: line.map(({ from }) => [from[ends.dp]![ofLane]!]), to: [] };
	const common = { ...rows, counted: false };
	const groups = await directionGroups(world, name, pipeline);
	return Array.from({ length: stages * virtualStages - 1 }, (_, from) => ({ from, layout: line[from % stages]! }))
		.filter(({ layout }) => ranksOf(layout).includes(world.rank))
		.map(({ from, layout }) => {
			const edge = new Edge(world.device, { ...common, width: width(from), layout, groups });
			return { from: { module, index: from }, to: { module, index: from + 1 }, edge };
		});
}

/** Links of this rank's chunks for the pooled balancing loss; null: the model has none. */
async function poolStages(
	{ language }: RunSpecification,
	topology: Topology,
	world: World,
	shape: StepShape,
	routers: Group,
): Promise<PooledStages | null> {
	if (pooledCoefficient(language) === null) return null;
	const common = { rank: world.rank, inFlight: inFlight(shape), name: `${shape.pipeline}.routers` };
	const rows = { ...common, width: () => language.moe.experts, dtype: "f32" as const };
	return { routers, edges: connected(await stageEdges(topology.language, world, rows, shape.virtualStages)) };
}

function connected(edges: HeldEdge[]): HeldEdge[] {
	for (const { edge } of edges) edge.connect();
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
	{ encoders: specified }: RunSpecification,
	topology: Topology,
	encoders: readonly HeldModule<EncoderModule>[],
): Participation | null {
	const index = specified.findIndex(({ participation }) => participation !== undefined);
	if (index < 0) return null;
	const { parts, participation } = specified[index]!;
	const encoder = encoders.find(({ name }) => name === parts.name);
	return {
		policy: participation!.policy,
		ranks: topology.encoders[index]!.lanes,
		replica: encoder?.replica ?? null,
		// Tensor-parallel ranks and stages see the same images, so one of them votes.
		votes: encoder?.groups.lane.rank === 0 ? sawImages(encoder.name) : () => 0,
	};
}

function countsTensor(tensor: LogicalTensor, modules: readonly HeldModule<Module>[]): boolean {
	const { groups, replica } =
		modules.find(({ name }) => tensor.name.startsWith(encoderPrefix(name))) ?? modules.at(-1)!;
	const { replicas, model } = groups;
	const copies = replica.groups.copies;
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
