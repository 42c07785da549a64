/** Every rank has the same router, and layouts draw the same (docs/spec/elastic.md §4, §5, §13). */
import { expect, test } from "bun:test";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { runRanks } from "../../parallel/ranks.ts";
import { byLayer, softMasks } from "./family-model.ts";

interface Printed {
	readonly first: { readonly loss: number; readonly budgetLoss: number; readonly norm: number };
	readonly drawn: readonly { readonly budget: unknown; readonly hard: boolean; readonly noise: readonly number[] }[];
	readonly weights: string;
}

async function train(layout: string, keys: Readonly<Record<string, unknown>>, steps: number): Promise<Printed[]> {
	const ranks = namedTopology(parseLayout(layout)).topology.worldSize;
	const outcomes = await runRanks("../guests/elastic/copies-rank.ts", ranks, [
		layout,
		JSON.stringify(keys),
		String(steps),
	]);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	return outcomes.map(({ stdout }) => JSON.parse(stdout));
}

const soft = { ...byLayer, ...softMasks, "hybrid-layer-pattern": "MEM*|EM-E*", "lr-mult-router": 10 };

const steps = process.env.MIMO_TEST_FULL === "1" ? 50 : 12;

test(`after ${steps} steps all copies of the router are the same bit for bit`, async () => {
	const [tp2pp2, dp2] = [await train("tp2pp2", soft, steps), await train("dp2", soft, steps)];
	for (const copies of [tp2pp2, dp2]) expect(new Set(copies.map(({ weights }) => weights)).size).toBe(1);
}, 60_000);

test.each([
	["pp2", {}],
	["pp2", { "hybrid-layer-pattern": "ME|M*|EM|-E*" }],
	["tp2", {}],
	["pp2", { "recompute-granularity": "full", "recompute-num-layers": 2 }],
])(
	"microbatches of sizes of their own give on %s with %j what one process gives",
	async (layout, changes) => {
		const [alone] = await train("1", soft, 1);
		const all = await train(layout, { ...soft, ...changes }, 1);
		for (const { drawn } of all) expect(drawn).toEqual(alone!.drawn);
		expect(new Set(alone!.drawn.map(({ noise }) => noise[0])).size).toBe(3);
		for (const { first } of all) {
			for (const key of ["loss", "budgetLoss", "norm"] as const)
				expect(Math.abs(first[key] / alone!.first[key] - 1)).toBeLessThan(1e-5);
		}
	},
	60_000,
);

test("lanes draw budgets together, and noise each for itself unless they share experts", async () => {
	const [apart, shared] = [await train("dp2", soft, 1), await train("dp2ep2", soft, 1)];
	for (const [a, b] of [apart, shared])
		expect(a!.drawn.map(({ budget }) => budget)).toEqual(b!.drawn.map(({ budget }) => budget));
	const noise = ({ drawn }: Printed) => drawn.map((one) => one.noise);
	expect(noise(apart[0]!)).not.toEqual(noise(apart[1]!));
	expect(noise(shared[0]!)).toEqual(noise(shared[1]!));
}, 60_000);
