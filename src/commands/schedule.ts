/**
 * The output of `mimo train --print-schedule`: every rank's actions over time, if a backward pass takes as long as two
 * forward passes, half of it for the gradients of weights.
 */
import type { ResolvedConfiguration } from "../config/resolve.ts";
import { columns } from "../observe/output.ts";
import { actorRanks, stepShape } from "../plan/run-plan.ts";
import { type Action, actorsOf, isWork, type ScheduleShape } from "../schedule/actions.ts";
import { lastNode } from "../schedule/combined.ts";
import { actionsOf } from "../schedule/rank-actions.ts";
import { actorName, type Simulation, simulate } from "../schedule/simulate.ts";

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
