/** Times of actions whose actors share cores, begin later, or wait for transfers. */
import { expect, test } from "bun:test";
import type { Action } from "../../src/schedule/actions.ts";
import { simulate } from "../../src/schedule/simulate.ts";

const encoderChunk = { module: "encoder", index: 0 };
const languageChunk = (index: number) => ({ module: "language", index });
const forward = (microbatch: number, chunk = languageChunk(0)): Action => ({ kind: "forward", chunk, microbatch });
const move = (kind: "send" | "receive"): Action => ({
	kind,
	direction: "forward",
	from: languageChunk(0),
	to: languageChunk(1),
	microbatch: 0,
});

test("actors that share fewer cores than they use work at the same lower speed", () => {
	const lists = [
		{ actor: 0, actions: [forward(0)] },
		{ actor: 1, actions: [forward(0)] },
		{ actor: 2, actions: [forward(0)] },
	];
	const of = (_: Action, actor: number | string) => [2, 2, 4][actor as number]!;
	const ends = (shared: number) =>
		simulate(lists, { of, cores: { shared, of: () => 1 } }).timelines.map(({ actions }) => actions[0]!.end);
	expect(ends(3)).toEqual([2, 2, 4]);
	// Three on two cores go at two thirds until the first two are done; the last then has a core of its own.
	const [first, second, third] = ends(2);
	expect(first).toBeCloseTo(3, 12);
	expect(second).toBeCloseTo(3, 12);
	expect(third).toBeCloseTo(5, 12);
	// One core does all work one after the other, as far as its end goes.
	expect(ends(1).at(-1)).toBeCloseTo(8, 12);
});

test("an actor begins when it is free; a message takes its time", () => {
	const lists = [
		{ actor: 0, actions: [forward(0), move("send")] },
		{ actor: 1, actions: [forward(0, languageChunk(1)), move("receive"), forward(1, languageChunk(1))] },
	];
	const { timelines, end } = simulate(lists, {
		of: ({ kind }) => (kind === "forward" ? 1 : 0),
		transfer: () => 0.5,
		begin: (actor) => (actor === 0 ? 2 : 0),
	});
	expect(timelines[0]!.actions.map(({ begin }) => begin)).toEqual([2, 3]);
	expect(timelines[1]!.actions.map(({ begin, end }) => [begin, end])).toEqual([
		[0, 1],
		[3.5, 3.5],
		[3.5, 4.5],
	]);
	expect(end).toBe(4.5);
});

test("actors of one name do an action together, others by themselves", () => {
	const lists = [0, 1, 2].map((actor) => ({ actor, actions: [forward(0), forward(0, encoderChunk)] }));
	const { timelines } = simulate(lists, {
		of: (action, actor) => ("chunk" in action && action.chunk.module === "encoder" ? 1 : 1 + Number(actor)),
		together: (action, actor) =>
			"chunk" in action && action.chunk.module === "encoder" ? (actor === 2 ? "last" : "both") : null,
	});
	expect(timelines.map(({ actions }) => actions[1]!.begin)).toEqual([2, 2, 3]);
});
