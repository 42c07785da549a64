/** Every schedule over hundreds of shapes: transfers match, no ranks deadlock, few microbatches are in flight. */
import { describe, expect, setDefaultTimeout, test } from "bun:test";
import {
	type Action,
	type Actor,
	actorsOf,
	chunkName,
	describeAction,
	type EncoderShape,
	isWork,
	type PassAction,
	type ScheduleShape,
} from "../../src/schedule/actions.ts";
import { lastNode } from "../../src/schedule/combined.ts";
import { actionsOf, inFlight, mostInFlight } from "../../src/schedule/rank-actions.ts";
import { simulate } from "../../src/schedule/simulate.ts";
import { randomValues } from "../support.ts";

// Thousands of schedules are simulated, on a machine that others use too.
setDefaultTimeout(60_000);

const languageChunk = (index: number) => ({ module: "language", index });
/** The chunks of an encoder. */
const chunksOf = ({ name, trains }: EncoderShape) => trains.map((_, index) => ({ module: name, index }));

/** Random whole numbers that repeat. */
function numbers(seed: number): (least: number, most: number) => number {
	let at = 0;
	const values = randomValues(1 << 16, seed);
	return (least, most) => least + Math.floor(((values[at++ % values.length]! + 1) / 2) * (most - least + 0.999));
}

function randomShapes(count: number, seed: number): ScheduleShape[] {
	const next = numbers(seed);
	return Array.from({ length: count }, () => {
		const stages = next(1, 6);
		const encoders = ["vision", "audio", "depth"].slice(0, next(0, 3)).map((name) => {
			const [colocated, trained] = [next(0, 1) === 0, next(0, 3) > 0];
			const stages = colocated ? 1 : next(1, 3);
			// A frozen tower leaves its last stage, with the projector, to train.
			const first = next(0, 3) > 0 ? 0 : stages - 1;
			return { name, colocated, trains: Array.from({ length: stages }, (_, stage) => trained && stage >= first) };
		});
		const virtualStages = stages === 1 ? 1 : next(1, 4);
		const blocks = () => Array.from({ length: next(0, 4) }, () => next(0, 1) === 0);
		const exchanges = Array.from({ length: stages * virtualStages }, blocks);
		return {
			microbatches: next(1, 17),
			pipeline: "language",
			stages,
			virtualStages,
			groupSize: stages + next(0, 4),
			encoders,
			lateWeightGradients: next(0, 1) === 0,
			overlap: next(0, 2) === 0 ? { exchanges, earlyRelease: next(0, 1) === 0 } : null,
			forwardOnly: next(0, 5) === 0,
		};
	});
}

type ActorList = { readonly actor: Actor; readonly actions: readonly Action[] };
/** Lists of actions by shape, kept because several tests use the same shapes. */
const knownLists = new WeakMap<ScheduleShape, readonly ActorList[]>();
function listsOf(shape: ScheduleShape): readonly ActorList[] {
	const known = knownLists.get(shape);
	if (known) return known;
	const lists = actorsOf(shape).map((actor) => ({ actor, actions: actionsOf(shape, actor) }));
	knownLists.set(shape, lists);
	return lists;
}
/** Passes, at the first of their nodes. */
const passesOf = (actions: readonly Action[]) => {
	const begun = new Set<string>();
	return actions.flatMap((action): PassAction[] => {
		if (action.kind !== "forward" && action.kind !== "backward") return [];
		const { node: _, ...pass } = action;
		if (begun.has(describeAction(pass))) return [];
		begun.add(describeAction(pass));
		return [pass];
	});
};
const transfersOf = (actions: readonly Action[], kind: "send" | "receive") =>
	actions
		.filter((action) => action.kind === kind)
		.map((action) => describeAction({ ...action, kind: "send" } as Action));

/** Every module's rows, and their gradients, have a line of their own. */
const lines = ["rows", "the gradient of rows"].flatMap((what) =>
	["vision", "audio", "depth", "language"].map(
		(module) => (text: string) => text.startsWith(`send ${what} from ${module}.`),
	),
);

/** Ranks of a stage, and ranks that a microbatch's rows go to. */
function holds(shape: ScheduleShape, actor: Actor): string[] {
	if (typeof actor === "string") {
		const [, name, stage = "0"] = /^(\w+)(?: stage (\d))?$/.exec(actor)!;
		return [`${name}.${stage}`];
	}
	const own = Array.from({ length: shape.virtualStages }, (_, virtual) =>
		chunkName(languageChunk(virtual * shape.stages + actor)),
	);
	return [
		...shape.encoders
			.filter(({ colocated }) => colocated)
			.flatMap(chunksOf)
			.map(chunkName),
		...own,
	];
}

describe("over random shapes", () => {
	const shapes = randomShapes(process.env.MIMO_TEST_FULL ? 2000 : 400, 7);

	test("every chunk passes every microbatch forward once, and backward once and later, in order", () => {
		for (const shape of shapes) {
			for (const { actor, actions } of listsOf(shape)) {
				const passes = passesOf(actions);
				const frozen = shape.encoders.flatMap((one) =>
					chunksOf(one)
						.filter(({ index }) => !one.trains[index])
						.map(chunkName),
				);
				const wanted = holds(shape, actor).flatMap((chunk) => {
					const ways = shape.forwardOnly || frozen.includes(chunk) ? [] : ["backward"];
					return ["forward", ...ways].map((kind) => `${kind} ${chunk}`);
				});
				const found = Map.groupBy(passes, ({ kind, chunk }) => `${kind} ${chunkName(chunk)}`);
				expect([...found.keys()].sort()).toEqual(wanted.sort());
				for (const list of found.values()) {
					expect(list.map(({ microbatch }) => microbatch)).toEqual([...Array(shape.microbatches).keys()]);
				}
				const done = new Set<string>();
				for (const { kind, chunk, microbatch } of passes) {
					const key = `${chunkName(chunk)} ${microbatch}`;
					if (kind === "forward") done.add(key);
					else expect(done.has(key)).toBeTrue();
				}
			}
		}
	});

	test("every receive has its send, and between two ranks they come in the same order", () => {
		for (const shape of shapes) {
			const lists = listsOf(shape);
			const all = (kind: "send" | "receive") => new Set(lists.flatMap(({ actions }) => transfersOf(actions, kind)));
			expect([...all("send")].sort()).toEqual([...all("receive")].sort());
			for (const line of lines) {
				for (const from of lists) {
					const sends = transfersOf(from.actions, "send").filter(line);
					for (const to of lists) {
						const receives = transfersOf(to.actions, "receive").filter(line);
						const common = new Set(sends).intersection(new Set(receives));
						expect(sends.filter((one) => common.has(one))).toEqual(receives.filter((one) => common.has(one)));
					}
				}
			}
		}
	}, 60_000);

	test("every late weight gradient is computed once, after its backward pass and before the sums begin, few at once", () => {
		for (const shape of shapes) {
			for (const { actor, actions } of listsOf(shape)) {
				if (shape.overlap) continue;
				const late = shape.lateWeightGradients && !shape.forwardOnly && typeof actor === "number";
				const backwards = passesOf(actions).filter(
					({ kind, chunk }) => kind === "backward" && chunk.module === "language",
				);
				const computed = actions.filter(({ kind }) => kind === "weight gradient");
				// In the order of the backward passes, so that sums round alike.
				expect(computed.map(describeAction)).toEqual(
					late ? backwards.map((pass) => describeAction({ ...pass, kind: "weight gradient" })) : [],
				);
				const left = new Set<string>();
				for (const [at, action] of actions.entries()) {
					if (action.kind === "reduce" && action.module === "language") expect(left.size).toBe(0);
					if (!isWork(action) || action.chunk.module !== "language") continue;
					const { kind, chunk, microbatch } = action;
					const key = `${chunkName(chunk)} ${microbatch}`;
					if (kind === "backward" && late) left.add(key);
					if (kind === "weight gradient") expect(left.delete(key)).toBeTrue();
					expect(left.size).toBeLessThanOrEqual(typeof actor === "string" ? 0 : actor + 1);
					// Nothing that another rank waits for is held up by it.
					const next = actions[at + 1];
					if (kind === "weight gradient") expect(next?.kind === "send" && next.direction === "backward").toBeFalse();
				}
			}
		}
	});

	test("passes in turns: every node once, in order, each pass's weight gradients after its nodes", () => {
		for (const shape of shapes) {
			if (shape.overlap === null || shape.forwardOnly) continue;
			for (const { actor, actions } of listsOf(shape)) {
				if (typeof actor === "string") continue;
				const work = actions.filter(isWork).filter(({ chunk }) => chunk.module === "language");
				const byPass = Map.groupBy(work, ({ chunk, microbatch }) => `${chunkName(chunk)} ${microbatch}`);
				for (const pass of byPass.values()) {
					const last = lastNode(shape.overlap, pass[0]!.chunk.index);
					const all = [...Array(last + 1).keys()];
					const nodes = (kind: Action["kind"]) => pass.filter((one) => one.kind === kind).map(({ node }) => node);
					expect([all, [undefined]] as (number | undefined)[][]).toContainEqual(nodes("forward"));
					expect([all.toReversed(), [undefined]] as (number | undefined)[][]).toContainEqual(nodes("backward"));
					const late = nodes("weight gradient");
					if (nodes("backward").length === 1 || !shape.lateWeightGradients) expect(late).toEqual([]);
					else expect(late.at(-1)).toBeUndefined();
					for (const [at, { kind, node }] of pass.entries()) {
						if (kind !== "weight gradient") continue;
						const before = pass
							.slice(0, at)
							.filter((one) => one.kind === "backward")
							.map((one) => one.node);
						expect(before).toContain(node ?? 0);
					}
				}
			}
		}
	});

	test("passes in turns: the exchange of one is started before the other computes", () => {
		const shape = {
			...{
				microbatches: 3,
				pipeline: "language",
				stages: 1,
				virtualStages: 1,
				groupSize: 1,
				encoders: [],
				forwardOnly: false,
			},
			lateWeightGradients: true,
			overlap: { exchanges: [[true]], earlyRelease: false },
		};
		const names = (some: readonly Action[]) =>
			some.filter(isWork).map(({ kind, microbatch, node }) => `${kind[0]}${microbatch}.${node ?? ""}`);
		expect(names(actionsOf(shape, 0)).slice(1, 14)).toEqual([
			...["f1.0", "b0.4", "b0.3", "f1.1", "b0.2", "w0.2", "f1.2", "b0.1", "f1.3", "f1.4", "b0.0", "w0.", "f2.0"],
		]);
		const early = actionsOf({ ...shape, overlap: { ...shape.overlap, earlyRelease: true } }, 0);
		expect(names(early).slice(5, 10)).toEqual(["b0.2", "w0.2", "b0.1", "f1.2", "f1.3"]);
	});

	test("late weight gradients never make a step longer", () => {
		for (const shape of shapes) {
			if (!shape.lateWeightGradients || shape.forwardOnly || shape.overlap) continue;
			const of = (action: Action) => {
				if (!isWork(action)) return 0;
				const whole = action.chunk.module !== "language" || !shape.lateWeightGradients;
				return action.kind === "backward" && whole ? 2 : 1;
			};
			const together = (action: Action) => (isWork(action) && action.chunk.module !== "language" ? "all" : null);
			const immediate = { ...shape, lateWeightGradients: false };
			const twice = ({ kind }: Action) => ({ forward: 1, backward: 2 })[kind as "forward" | "backward"] ?? 0;
			const { end } = simulate(listsOf(shape), { of, together });
			expect(end).toBeLessThanOrEqual(simulate(listsOf(immediate), { of: twice, together }).end);
		}
	});

	test("no ranks wait for each other, even where the encoder's ranks go together", () => {
		for (const shape of shapes) {
			const together = (action: Action) =>
				(action.kind === "forward" || action.kind === "backward") && action.chunk.module !== "language" ? "all" : null;
			for (const durations of [{ of: () => 1 }, { of: () => 1, together }]) {
				expect(() => simulate(listsOf(shape), durations)).not.toThrow();
			}
		}
	});

	test("no chunk has more microbatches under way than its schedule says, and no edge more messages", () => {
		for (const shape of shapes.filter(({ forwardOnly }) => !forwardOnly)) {
			const { stages, virtualStages, groupSize, microbatches } = shape;
			for (const { actor, actions } of listsOf(shape)) {
				const passes = passesOf(actions);
				const first = mostInFlight(passesOf(actionsOf(shape, 0)), languageChunk(0));
				for (const { colocated, trains, ...encoder } of shape.encoders) {
					for (const chunk of chunksOf({ colocated, trains, ...encoder })) {
						if (!trains[chunk.index] || !holds(shape, actor).includes(chunkName(chunk))) continue;
						const ahead = colocated ? stages - 1 : 2 + trains.length - 1 - chunk.index;
						expect(mostInFlight(passes, chunk)).toBeLessThanOrEqual(first + ahead);
					}
				}
				if (typeof actor === "string") continue;
				// The warm-up's passes and one more; a group has at most P − 1 microbatches beyond G.
				const group = microbatches < groupSize + stages ? microbatches : groupSize + stages - 1;
				const bound = 2 * (stages - actor - 1) + (virtualStages - 1) * group + 1;
				let [live, most] = [0, 0];
				for (const { kind } of passes.filter(({ chunk }) => chunk.module === "language")) {
					live += kind === "forward" ? 1 : -1;
					most = Math.max(most, live);
				}
				// Passes that take turns begin one earlier, and one ends as the next begins.
				const more = shape.overlap ? 1 : 0;
				expect(most).toBeLessThanOrEqual((virtualStages === 1 ? stages - actor : bound) + more);
			}
		}
	});

	test("messages that are on their way at once are fewer than a sender may have", () => {
		for (const shape of shapes.filter(
			({ forwardOnly, encoders }) => !forwardOnly && encoders.every(({ trains }) => trains.every(Boolean)),
		)) {
			const most = inFlight(shape);
			const backward = shape.lateWeightGradients ? 1 : 2;
			const { timelines } = simulate(listsOf(shape), { of: ({ kind }) => (kind === "backward" ? backward : 1) });
			for (const { actions } of timelines) {
				const sends = actions.filter(({ action }) => action.kind === "send");
				const lines = Map.groupBy(sends, ({ action }) => describeAction(action).replace(/ microbatch.*/, ""));
				for (const line of lines.values()) {
					for (const [index, { action, end }] of line.entries()) {
						const earlier = line[index - most];
						if (!earlier) continue;
						const wanted = describeAction({ ...earlier.action, kind: "receive" } as Action);
						const received = timelines.flatMap((timeline) =>
							timeline.actions.filter((one) => describeAction(one.action) === wanted).map((one) => one.end),
						);
						expect({ action, late: Math.max(...received) > end }).toEqual({ action, late: false });
					}
				}
			}
		}
	});
});

test("ranks that wait for each other are named", () => {
	const receive = (to: number): Action => ({
		kind: "receive",
		direction: "forward",
		from: languageChunk(0),
		to: languageChunk(to),
		microbatch: 0,
	});
	const send = (to: number): Action => ({
		kind: "send",
		direction: "forward",
		from: languageChunk(0),
		to: languageChunk(to),
		microbatch: 0,
	});
	const lists = [
		{ actor: 0, actions: [receive(0), send(1)] },
		{ actor: 1, actions: [receive(1), send(0)] },
	];
	expect(() => simulate(lists, { of: () => 1 })).toThrow(
		'Ranks wait for each other: stage 0 at "receive rows from language.0 into language.0 microbatch 0", stage 1',
	);
});

describe("idle shares are those of the formula", () => {
	const idle = (shape: ScheduleShape) => {
		const parts = { forward: 1, backward: shape.lateWeightGradients ? 1 : 2, "weight gradient": 1 };
		const { end } = simulate(listsOf(shape), {
			of: (action) => (isWork(action) ? parts[action.kind] : 0) / shape.virtualStages,
		});
		const busy = 3 * shape.microbatches;
		return (end - busy) / busy;
	};
	const plain = {
		pipeline: "language",
		virtualStages: 1,
		encoders: [],
		lateWeightGradients: false,
		overlap: null,
		forwardOnly: false,
	};
	test("1F1B: (P − 1) / M", () => {
		for (const [stages, microbatches] of [
			[2, 8],
			[4, 8],
			[4, 32],
			[8, 16],
		] as const) {
			const shape = { ...plain, stages, microbatches, groupSize: stages };
			expect(idle(shape)).toBeCloseTo((stages - 1) / microbatches, 10);
		}
	});
	test("interleaved: (P − 1) / (M V)", () => {
		for (const [stages, virtualStages, microbatches] of [
			[2, 2, 8],
			[4, 2, 8],
			[4, 3, 16],
			[8, 4, 16],
		] as const) {
			const shape = { ...plain, stages, virtualStages, microbatches, groupSize: stages };
			expect(idle(shape)).toBeCloseTo((stages - 1) / (microbatches * virtualStages), 10);
		}
	});
	test("late weight gradients: a third of it, (P − 1) (F + B − W) / (M V (F + B + W))", () => {
		for (const [stages, virtualStages, microbatches] of [
			[2, 1, 8],
			[4, 1, 8],
			[8, 1, 32],
			[4, 2, 8],
			[4, 3, 16],
			[8, 2, 32],
		] as const) {
			const shape = { ...plain, lateWeightGradients: true, stages, virtualStages, microbatches, groupSize: stages };
			expect(idle(shape)).toBeCloseTo((stages - 1) / (3 * microbatches * virtualStages), 10);
		}
	});
});

test("an encoder beside a model of one stage is two microbatches ahead, and each stage before its last one more", () => {
	const shape = {
		...{ microbatches: 4, pipeline: "language", stages: 1, virtualStages: 1, groupSize: 1, forwardOnly: false },
		lateWeightGradients: false,
		overlap: null,
		encoders: [{ name: "encoder", colocated: false, trains: [true] }],
	};
	const letters = (actor: Actor, encoders: readonly EncoderShape[] = shape.encoders) =>
		passesOf(actionsOf({ ...shape, encoders }, actor))
			.map(({ kind, microbatch }) => `${kind === "forward" ? "F" : "B"}${microbatch}`)
			.join(" ");
	expect(letters("encoder")).toBe("F0 F1 F2 B0 F3 B1 B2 B3");
	expect(letters(0)).toBe("F0 B0 F1 B1 F2 B2 F3 B3");
	const two = (...trains: boolean[]) => [{ name: "encoder", colocated: false, trains }];
	expect(letters("encoder stage 0", two(true, true))).toBe("F0 F1 F2 F3 B0 B1 B2 B3");
	expect(letters("encoder stage 1", two(true, true))).toBe("F0 F1 F2 B0 F3 B1 B2 B3");
	// A frozen tower with a projector that trains.
	expect(letters("encoder stage 0", two(false, true))).toBe("F0 F1 F2 F3");
	const kinds = actionsOf({ ...shape, encoders: two(false, true) }, "encoder stage 1").map(({ kind }) => kind);
	const forward = "receive forward send";
	const backward = "receive backward";
	expect(kinds.join(" ")).toBe(
		[forward, forward, forward, backward, forward, backward, backward, backward, "reduce"].join(" "),
	);
});
