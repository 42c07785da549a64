/** A layout as plain data: what `mimo train --print-topology --json` prints, and its table is made of. */
import { type Coordinates, type Grid, type GroupKind, groupsOf } from "./grid.ts";
import type { Topology } from "./topology.ts";

/**
 * The groups of a module by the names of runtime.md §1.2; names in one line have equal members. null: every rank alone,
 * because there is neither context parallelism nor weight sharding here.
 */
const groupNames: readonly (readonly [kind: GroupKind | null, names: readonly string[]])[] = [
	["tp", ["tp", "tp_cp"]],
	[null, ["gtp", "cp"]],
	["pp", ["pp"]],
	["dp", ["dp", "dp_cp", "dp_cp_gtp"]],
	["mp", ["mp"]],
	["tp_dp", ["tp_dp", "tp_dp_cp"]],
	["module", ["intra_dist_opt"]],
	["ep", ["ep"]],
	["expt_tp", ["expt_tp"]],
	[null, ["expt_gtp"]],
	["expt_dp", ["expt_dp", "expt_dp_gtp"]],
	["tp_ep", ["tp_ep"]],
	["tp_ep_pp", ["tp_ep_pp", "tp_ep_gtp_pp"]],
];

export interface NamedGroups {
	/** Names of runtime.md §1.2 for these groups. */
	readonly names: readonly string[];
	/** Global ranks, ascending; groups in the order of their first ranks. */
	readonly groups: readonly (readonly number[])[];
}

export interface ModuleDescription {
	readonly name: string;
	readonly offset: number;
	readonly size: number;
	readonly sizes: Readonly<Record<keyof Coordinates, number>>;
	/** Ranks of every data lane, all its pipeline stages. */
	readonly lanes: readonly (readonly number[])[];
	readonly groups: readonly NamedGroups[];
}

export interface RankPlace extends Coordinates {
	readonly rank: number;
	readonly module: string;
	/** Pipeline stage over both modules: the encoder's come first. */
	readonly stage: number;
}

/** Lanes of both sides that exchange rows with each other only, and the ranks that do it for them. */
export interface RouteDescription {
	/** Encoder lanes and the ranks that send for them. */
	readonly sources: readonly number[];
	readonly sourceLeaders: readonly number[];
	/** Language lanes and the ranks that receive for them. */
	readonly destinations: readonly number[];
	readonly destinationLeaders: readonly number[];
}

export interface TopologyDescription {
	readonly worldSize: number;
	/** One process holds both modules. */
	readonly colocated: boolean;
	readonly modules: readonly ModuleDescription[];
	readonly ranks: readonly RankPlace[];
	readonly routes: readonly RouteDescription[];
	/** Groups over both modules: world, and with a bridge bridge-src, bridge-dst and bridge-p2p. */
	readonly groups: readonly NamedGroups[];
	/** Rank that tells all others a step's number of loss tokens. */
	readonly tokenSource: number;
}

export function describeTopology(topology: Topology): TopologyDescription {
	const { encoder, language, worldSize, colocated } = topology;
	const modules = [
		...(encoder ? [describeModule(encoder, [])] : []),
		describeModule(language, embeddingGroups(language)),
	];
	const ranks = Array.from({ length: worldSize }, (_, rank) => ({
		rank,
		module: topology.moduleOf(rank),
		stage: topology.stageOf(rank),
		...topology.gridOf(rank).coordinates(rank),
	}));
	const groups = [{ names: ["world"], groups: [ranks.map(({ rank }) => rank)] }, ...bridgeGroups(topology)];
	const { tokenSource } = topology;
	return { worldSize, colocated, modules, ranks, routes: describeRoutes(topology), groups, tokenSource };
}

/** Routes with a lane in common make one description: a fan-out or a fan-in. */
function describeRoutes(topology: Topology): RouteDescription[] {
	const { routes, encoder, language } = topology;
	if (!encoder) return [];
	const fanOut = language.lanes >= encoder.lanes;
	const together = Map.groupBy(routes, ({ source, destination }) => (fanOut ? source : destination));
	return [...together.values()].map((some) => {
		const sources = [...new Set(some.map(({ source }) => source))];
		const destinations = [...new Set(some.map(({ destination }) => destination))];
		return {
			sources,
			sourceLeaders: sources.map((lane) => topology.sourceLeader(lane)),
			destinations,
			destinationLeaders: destinations.map((lane) => topology.destinationLeader(lane)),
		};
	});
}

function describeModule(grid: Grid, more: readonly NamedGroups[]): ModuleDescription {
	const { tensor, data, pipeline, expert, expertTensor } = grid.shape;
	return {
		name: grid.name,
		offset: grid.offset,
		size: grid.size,
		sizes: { tp: tensor, dp: data, pp: pipeline, expt_tp: expertTensor, ep: expert, expt_dp: grid.expertData },
		lanes: grid.groups("dense", ["tp", "pp"]),
		groups: [
			...groupNames.map(([kind, names]) => ({
				names,
				groups: kind === null ? grid.ranks.map((rank) => [rank]) : groupsOf(grid, kind),
			})),
			...more,
		],
	};
}

/** First and last stage of every pipeline: what tied embeddings would need. */
function embeddingGroups(language: Grid): NamedGroups[] {
	const lines = groupsOf(language, "pp");
	return [
		{ names: ["embd"], groups: lines.map((line) => [...new Set([line[0]!, line.at(-1)!])]) },
		{ names: ["pos_embd"], groups: lines.map((line) => [line[0]!]) },
	];
}

function bridgeGroups(topology: Topology): NamedGroups[] {
	const { encoder, language } = topology;
	if (!encoder) return [];
	return [
		{ names: ["bridge-src"], groups: Array.from({ length: encoder.lanes }, (_, lane) => topology.sourceLane(lane)) },
		{
			names: ["bridge-dst"],
			groups: Array.from({ length: language.lanes }, (_, lane) => topology.destinationLane(lane)),
		},
		{ names: ["bridge-p2p"], groups: [topology.leaders] },
	];
}
