/** A topology as plain data, as `mimo train --print-topology --json` prints it. */
import { ranksOf } from "./edge-layout.ts";
import { type Coordinates, type Grid, groupsOf, kindsOf } from "./grid.ts";
import type { FeatureEdge, Topology } from "./topology.ts";

export interface NamedGroups {
	/** Name of the group kind, without the module. */
	readonly name: string;
	/** Global ranks, ascending; groups in the order of their first ranks. */
	readonly groups: readonly (readonly number[])[];
}

export interface ModuleDescription {
	readonly name: string;
	readonly offset: number;
	readonly size: number;
	readonly sizes: Readonly<Record<keyof Coordinates, number>>;
	/** Ranks of each data lane over all its pipeline stages. */
	readonly lanes: readonly (readonly number[])[];
	readonly groups: readonly NamedGroups[];
}

export interface RankPlace extends Coordinates {
	readonly rank: number;
	readonly module: string;
}

/** Lanes of an encoder and of the language model that exchange rows with each other only. */
export interface RouteDescription {
	/** The encoder. */
	readonly module: string;
	/** Encoder lanes, and their ranks that send rows. */
	readonly sources: readonly number[];
	readonly sourceRanks: readonly number[];
	/** Language lanes, and their ranks that receive rows. */
	readonly destinations: readonly number[];
	readonly destinationRanks: readonly number[];
}

export interface TopologyDescription {
	readonly worldSize: number;
	/** Whether all modules are on the same ranks. */
	readonly colocated: boolean;
	readonly modules: readonly ModuleDescription[];
	readonly ranks: readonly RankPlace[];
	readonly routes: readonly RouteDescription[];
	/** Groups that span modules: the world and the ranks of each edge between modules. */
	readonly groups: readonly NamedGroups[];
}

export function describeTopology(topology: Topology): TopologyDescription {
	const { worldSize, colocated } = topology;
	const modules = topology.modules.map(describeModule);
	const ranks = Array.from({ length: worldSize }, (_, rank) => ({
		rank,
		module: topology.moduleOf(rank),
		...topology.gridOf(rank).coordinates(rank),
	}));
	const groups = [
		{ name: "world", groups: [ranks.map(({ rank }) => rank)] },
		...topology.featureEdges
			.map(({ encoder, layout }) => ({ name: `edge.${encoder.name}`, groups: [ranksOf(layout)] }))
			.filter(({ groups }) => groups[0]!.length > 1),
	];
	const routes = topology.featureEdges.flatMap((edge) => describeRoutes(topology, edge));
	return { worldSize, colocated, modules, ranks, routes, groups };
}

/** Merges routes that share a lane into one fan-out or fan-in. */
function describeRoutes({ language }: Topology, { encoder, layout, routes }: FeatureEdge): RouteDescription[] {
	const fanOut = language.lanes >= encoder.lanes;
	const together = Map.groupBy(routes, ({ source, destination }) => (fanOut ? source : destination));
	return [...together.values()].map((some) => {
		const sources = [...new Set(some.map(({ source }) => source))];
		const destinations = [...new Set(some.map(({ destination }) => destination))];
		return {
			module: encoder.name,
			sources,
			sourceRanks: sources.flatMap((lane) => layout.from[lane]!),
			destinations,
			destinationRanks: destinations.flatMap((lane) => layout.to[lane]!),
		};
	});
}

function describeModule(grid: Grid): ModuleDescription {
	const { tensor, data, pipeline, expert, expertTensor } = grid.shape;
	return {
		name: grid.name,
		offset: grid.offset,
		size: grid.size,
		sizes: {
			tp: tensor,
			cp: grid.context,
			dp: data,
			pp: pipeline,
			expt_tp: expertTensor,
			ep: expert,
			expt_dp: grid.expertData,
		},
		lanes: grid.groups("dense", ["tp", "cp", "pp"]),
		groups: kindsOf(grid).map((kind) => ({ name: kind, groups: groupsOf(grid, kind) })),
	};
}
