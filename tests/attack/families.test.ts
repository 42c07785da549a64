/** Drawn models of every family compute what transformers computes in float64: one of seed 3, six under MIMO_TEST_FULL; more are drawn by hand. */
import { expect, test } from "bun:test";
import { referencePython } from "../reference/python.ts";
import { type Drawn, drawnFamilies, meetFamilies } from "./families.ts";

const full = process.env.MIMO_TEST_FULL === "1";
const python = referencePython("torch", "transformers");

test.skipIf(python === null)(
	"models drawn of every family agree with transformers",
	async () => {
		const drawn: Drawn[] = [];
		const which = { families: drawnFamilies, count: full ? 6 : 1, seed: 3, first: 0 };
		for await (const one of meetFamilies(python!, { ...which, onLayouts: full, keep: null })) drawn.push(one);
		expect(drawn.filter(({ state }) => state !== "ok")).toEqual([]);
		expect(drawn.length).toBe(drawnFamilies.length * which.count);
	},
	600_000,
);
