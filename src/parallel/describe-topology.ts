/** A layout as plain data: what `mimo train --print-topology --json` prints, and its table is made of. */
import { type Coordinates, type Grid, type GroupKind, groupKinds, groupsOf } from "./grid.ts";
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
	/** Groups over both modules: world, and with an encoder of its own ranks bridge, the leaders of all lanes. */
	readonly groups: readonly NamedGroups[];
}

export function describeTopology(topology: Topology): TopologyDescription {
	const { encoder, language, worldSize, colocated } = topology;
	const modules = [...(encoder ? [encoder] : []), language].map(describeModule);
	const ranks = Array.from({ length: worldSize }, (_, rank) => ({
		rank,
		module: topology.moduleOf(rank),
		...topology.gridOf(rank).coordinates(rank),
	}));
	const groups = [
		{ name: "world", groups: [ranks.map(({ rank }) => rank)] },
		...(encoder ? [{ name: "bridge", groups: [topology.leaders] }] : []),
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
			sourceLeaders: sources.map((lane) => topology.sourceLeader(lane)),
			destinations,
			destinationLeaders: destinations.map((lane) => topology.destinationLeader(lane)),
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
		groups: (Object.keys(groupKinds) as GroupKind[]).map((kind) => ({ name: kind, groups: groupsOf(grid, kind) })),
	};
}
