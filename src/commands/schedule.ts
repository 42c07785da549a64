/** What `mimo train --print-schedule` prints: what every rank does when, if a backward pass takes two forward passes. */
import type { ResolvedConfiguration } from "../config/resolve.ts";
import { columns } from "../observe/columns.ts";
import { topologyOf } from "../parallel/topology.ts";
import { microbatchesOf } from "../plan/rank-run.ts";
import { actorRanks } from "../plan/run-plan.ts";
import { type Action, actorsOf, type ScheduleShape } from "../schedule/actions.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { actorName, type Simulation, simulate } from "../schedule/simulate.ts";
import { shapeOf } from "../train/assemble.ts";
import { specificationOf } from "../train/specification.ts";

/** Time slots of a forward pass through a segment, and of a backward pass. */
const slots = { forward: 1, backward: 2 } as const;

function scheduleOf({ configuration: c }: ResolvedConfiguration): { shape: ScheduleShape; simulation: Simulation } {
	const microbatches = microbatchesOf(c);
	const shape = { ...shapeOf(specificationOf(c), topologyOf(c)), microbatches, forwardOnly: false };
	const lists = actorsOf(shape).map((actor) => ({ actor, actions: actionsOf(shape, actor) }));
	// The encoder is drawn as long as a whole stage.
	const of = (action: Action) => {
		if (action.kind !== "forward" && action.kind !== "backward") return 0;
		return slots[action.kind] * (action.chunk.module === "encoder" ? shape.virtualStages : 1);
	};
	return { shape, simulation: simulate(lists, { of }) };
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
		"F, B: a microbatch forward, backward (two slots); e: through the encoder; .1: through the stage's second segment.",
	].join("\n");
}

/** Such as "F3", "B3.1" or "Fe3". */
function labelOf(action: Action, { stages }: ScheduleShape): string {
	if (action.kind !== "forward" && action.kind !== "backward") return "";
	const { kind, chunk, microbatch } = action;
	const letter = kind === "forward" ? "F" : "B";
	if (chunk.module === "encoder") return `${letter}e${microbatch}`;
	const virtual = Math.floor(chunk.index / stages);
	return `${letter}${microbatch}${virtual === 0 ? "" : `.${virtual}`}`;
}
