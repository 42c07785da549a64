/** The output of `mimo train --print-topology`: grids, ranks, groups, lanes and routes of a configuration's layout. */
import { encoderMicroBatchSize } from "../config/derive.ts";
import type { ResolvedConfiguration } from "../config/resolve.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { columns } from "../observe/output.ts";
import {
	describeTopology,
	type ModuleDescription,
	type NamedGroups,
	type TopologyDescription,
	topologyOf,
} from "../parallel/index.ts";
import { actorRanks, stepShape } from "../plan/run-plan.ts";
import { type Action, actorsOf, isWork, type ScheduleShape } from "../schedule/actions.ts";
import { lastNode } from "../schedule/combined.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { actorName, type Simulation, simulate } from "../schedule/simulate.ts";
import { counted } from "../system/counted.ts";

/** Number of groups in a line, and of ranks in a group, that the table shows; JSON has all. */
const shown = 8;

/** One JSON object: the description with group names as keys, and the notes. */
export function topologyJson({ configuration, notes }: ResolvedConfiguration): string {
	const description = describeTopology(topologyOf(configuration));
	const modules = description.modules.map((module) => ({
		...module,
		microBatchSize: microBatchSize(module, configuration),
		groups: byName(module.groups),
	}));
	return JSON.stringify({ ...description, modules, groups: byName(description.groups), notes }, null, 2);
}

/** Tables for people. */
export function topologyTable({ configuration, notes }: ResolvedConfiguration): string {
	const description = describeTopology(topologyOf(configuration));
	const sections = [
		[summary(description)],
		["# Grids", ...grids(description, configuration)],
		["# Ranks", ...ranks(description)],
		...description.modules.map((module) => [
			`# Groups of ${module.name}`,
			...groupLines([...module.groups, { name: "lanes", groups: module.lanes }], module.size),
		]),
		["# Groups of both modules", ...groupLines(description.groups, description.worldSize)],
		description.routes.length > 0 ? ["# Routes of image rows", ...routes(description)] : [],
		[...notes],
	];
	return sections
		.filter((lines) => lines.length > 0)
		.map((lines) => lines.join("\n"))
		.join("\n\n");
}

function summary({ worldSize, colocated, modules }: TopologyDescription): string {
	if (colocated && worldSize === 1) return "1 rank: encoder and language model in one process.";
	const spans = modules.map(({ name, offset, size }) => `${name} ${span(offset, size)}`).join(", ");
	return `${counted(worldSize, "rank")}: ${spans}.`;
}

function grids({ modules }: TopologyDescription, configuration: TrainingConfiguration): string[] {
	const sizes = Object.keys(modules[0]!.sizes) as (keyof ModuleDescription["sizes"])[];
	return columns([
		["module", "ranks", ...sizes, "lanes", "micro-batch-size"],
		...modules.map((module) => [
			module.name,
			span(module.offset, module.size),
			...sizes.map((size) => `${module.sizes[size]}`),
			`${module.lanes.length}`,
			`${microBatchSize(module, configuration)}`,
		]),
	]);
}

function ranks({ ranks }: TopologyDescription): string[] {
	const [first] = ranks;
	const names = Object.keys(first!) as (keyof typeof first & string)[];
	return columns([names, ...ranks.map((rank) => Object.values(rank).map(String))]);
}

function routes({ routes }: TopologyDescription): string[] {
	return columns([
		["encoder lanes", "ranks", "", "language lanes", "ranks"],
		...routes.map((route) => [
			ranksOf(route.sources),
			ranksOf(route.sourceRanks),
			"→",
			ranksOf(route.destinations),
			ranksOf(route.destinationRanks),
		]),
	]);
}

/** A line for each kind of group. `size`: number of ranks that could be members. */
function groupLines(named: readonly NamedGroups[], size: number): string[] {
	return columns(
		named.map(({ name, groups }) => {
			const every = size > 1 && groups.length === size;
			const some = groups.length > shown ? [...groups.slice(0, shown - 1), null, groups.at(-1)!] : groups;
			const text = some.map((group) => (group === null ? "…" : ranksOf(group))).join(" ");
			const count = groups.length > shown ? ` (${groups.length} groups)` : "";
			return [name, every ? "every rank alone" : `${text}${count}`];
		}),
	);
}

/** "[4,5]", "[8..263]", "[8,10,…,262]", "[0,1,2,3,4,5,6,…,262] (136)". */
function ranksOf(group: readonly number[]): string {
	const step = group[1]! - group[0]!;
	const even = group.every((rank, index) => rank === group[0]! + index * step);
	if (group.length > 4 && even) {
		return step === 1 ? `[${group[0]}..${group.at(-1)}]` : `[${group[0]},${group[1]},…,${group.at(-1)}]`;
	}
	if (group.length <= shown) return `[${group.join(",")}]`;
	return `[${group.slice(0, shown - 1).join(",")},…,${group.at(-1)}] (${group.length})`;
}

/** "0-3", "7". */
function span(offset: number, size: number): string {
	return size === 1 ? `${offset}` : `${offset}-${offset + size - 1}`;
}

/** Samples of one microbatch of one lane. */
function microBatchSize({ name }: ModuleDescription, configuration: TrainingConfiguration): number {
	return name === "language" ? configuration.microBatchSize : encoderMicroBatchSize(configuration);
}

function byName(named: readonly NamedGroups[]): Record<string, NamedGroups["groups"]> {
	return Object.fromEntries(named.map(({ name, groups }) => [name, groups]));
}

// The output of `mimo train --print-schedule`: every rank's actions over time, if a backward pass takes as long as two
// forward passes, half of it for the gradients of weights.

/** Time slots of a forward pass of a segment, of a whole backward pass, and of one without weight gradients. */
const slots = { forward: 1, backward: 2, "weight gradient": 1 } as const;
const slotsWithoutWeights = 1;

function scheduleOf({ configuration: c }: ResolvedConfiguration): { shape: ScheduleShape; simulation: Simulation } {
	const shape = stepShape(c);
	const lists = actorsOf(shape).map((actor) => ({ actor, actions: actionsOf(shape, actor) }));
	const duration = (action: Action) => {
		if (!isWork(action)) return 0;
		// In combined 1F1B a slot is a node.
		const { overlap } = shape;
		if (overlap !== null && action.chunk.module === shape.pipeline) {
			return action.node !== undefined || action.kind === "weight gradient"
				? 1
				: lastNode(overlap, action.chunk.index) + 1;
		}
		// An encoder pass is drawn as long as a stage's pass.
		if (action.chunk.module !== shape.pipeline) return slots[action.kind] * shape.virtualStages;
		return action.kind === "backward" && shape.lateWeightGradients ? slotsWithoutWeights : slots[action.kind];
	};
	return { shape, simulation: simulate(lists, { of: duration }) };
}

/** One JSON object: the shape, and of every actor its ranks and its actions with the slots in which they begin and end. */
export function scheduleJson(resolved: ResolvedConfiguration): string {
	const { shape, simulation } = scheduleOf(resolved);
	const ranks = new Map(actorRanks(resolved.configuration).map((one) => [one.actor, one.ranks]));
	const actors = simulation.timelines.map(({ actor, actions }) => ({ actor, ranks: ranks.get(actor), actions }));
	return JSON.stringify({ shape, slots: simulation.end, actors }, null, 2);
}

/** A row for the ranks that do the same, a column for every slot. */
export function scheduleTable(resolved: ResolvedConfiguration): string {
	const { shape, simulation } = scheduleOf(resolved);
	const ranks = new Map(actorRanks(resolved.configuration).map((one) => [one.actor, one.ranks]));
	const rows = simulation.timelines.map(({ actor, actions }) => {
		const cells = new Array<string>(simulation.end).fill(".");
		for (const { action, begin, end } of actions) {
			if (end === begin) continue;
			cells.fill("-", begin, end);
			cells[begin] = labelOf(action, shape);
		}
		const own = ranks.get(actor)!;
		const span = own.length === 1 ? `${own[0]}` : `${own[0]}-${own.at(-1)}`;
		return [actorName(actor), span, ...cells];
	});
	const header = ["", "ranks", ...Array.from({ length: simulation.end }, (_, slot) => `${slot}`)];
	return [
		...columns([header, ...rows]),
		[
			`F, B: a microbatch forward, backward${shape.lateWeightGradients ? "" : " (two slots)"}`,
			...(shape.lateWeightGradients ? ["W: weight gradients that backward has delayed"] : []),
			...(shape.overlap ? ["/1: one node of the pass, a slot each"] : []),
			"e: through an encoder, on shared ranks one after the other; .1: through the stage's second segment.",
		].join("; "),
	].join("\n");
}

/** Such as "F3", "B3.1", "W3" or "Fe3". */
function labelOf(action: Action, { pipeline, stages }: ScheduleShape): string {
	if (!isWork(action)) return "";
	const { kind, chunk, microbatch } = action;
	const letter = { forward: "F", backward: "B", "weight gradient": "W" }[kind];
	if (chunk.module !== pipeline) return `${letter}e${microbatch}`;
	const virtual = Math.floor(chunk.index / stages);
	const node = action.node === undefined ? "" : `/${action.node}`;
	return `${letter}${microbatch}${virtual === 0 ? "" : `.${virtual}`}${node}`;
}
