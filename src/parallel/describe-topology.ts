/** A topology as plain data, as `mimo train --print-topology --json` prints it. */
import { type Coordinates, type Grid, groupsOf, kindsOf } from "./grid.ts";
import type { Topology } from "./topology.ts";

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

/** Lanes of encoder and language model that exchange rows with each other only. */
export interface RouteDescription {
	/** Encoder lanes, and their ranks that send rows. */
	readonly sources: readonly number[];
	readonly sourceRanks: readonly number[];
	/** Language lanes, and their ranks that receive rows. */
	readonly destinations: readonly number[];
	readonly destinationRanks: readonly number[];
}

export interface TopologyDescription {
	readonly worldSize: number;
	/** Whether both modules are on the same ranks. */
	readonly colocated: boolean;
	readonly modules: readonly ModuleDescription[];
	readonly ranks: readonly RankPlace[];
	readonly routes: readonly RouteDescription[];
	/** Groups that span modules: the world and, with an encoder, the ranks of the image edge. */
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
		...(topology.imageRanks.length > 1 ? [{ name: "edge.image_rows", groups: [topology.imageRanks] }] : []),
	];
	return { worldSize, colocated, modules, ranks, routes: describeRoutes(topology), groups };
}

/** Merges routes that share a lane into one fan-out or fan-in. */
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
			sourceRanks: sources.flatMap((lane) => topology.imageEdge!.from[lane]!),
			destinations,
			destinationRanks: destinations.flatMap((lane) => topology.imageEdge!.to[lane]!),
		};
	});
}

function describeModule(grid: Grid): ModuleDescription {
	const { tensor, data, pipeline, expert, expertTensor } = grid.shape;
	return {
		name: grid.name,
		offset: grid.offset,
		size: grid.size,
		sizes: { tp: tensor, dp: data, pp: pipeline, expt_tp: expertTensor, ep: expert, expt_dp: grid.expertData },
		lanes: grid.groups("dense", ["tp", "pp"]),
		groups: kindsOf(grid).map((kind) => ({ name: kind, groups: groupsOf(grid, kind) })),
	};
}
