/** A layout as plain data: `mimo train --print-topology --json` prints it, and the table is made from it. */
import { type Coordinates, type Grid, groupsOf, kindsOf } from "./grid.ts";
import type { Topology } from "./topology.ts";

export interface NamedGroups {
	/** As the run calls them, without the module. */
	readonly name: string;
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
}

/** Lanes of both sides that exchange rows with each other only, and their ranks. */
export interface RouteDescription {
	/** Encoder lanes and the ranks that send their rows. */
	readonly sources: readonly number[];
	readonly sourceRanks: readonly number[];
	/** Language lanes and the ranks that receive rows. */
	readonly destinations: readonly number[];
	readonly destinationRanks: readonly number[];
}

export interface TopologyDescription {
	readonly worldSize: number;
	/** Both modules live on the same ranks. */
	readonly colocated: boolean;
	readonly modules: readonly ModuleDescription[];
	readonly ranks: readonly RankPlace[];
	readonly routes: readonly RouteDescription[];
	/** Groups over both modules: world, and with an encoder the ranks that image rows go between. */
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
