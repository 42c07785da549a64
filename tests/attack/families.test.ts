/**
 * Drawn models of every family compute what transformers computes in float64: one of seed 3, six under MIMO_TEST_FULL; of vision-language
 * models those whose options no reference run has. More are drawn by hand.
 */
import { expect, test } from "bun:test";
import { referencePython } from "../reference/python.ts";
import { type Drawn, drawnFamilies, drawnPictures, meetFamilies } from "./families.ts";

const full = process.env.MIMO_TEST_FULL === "1";
const python = referencePython("torch", "transformers");

test.skipIf(python === null)(
	"models drawn of every family agree with transformers",
	async () => {
		const drawn: Drawn[] = [];
		const pictures = full ? drawnPictures : ["internvl", "llava", "nemotron_h_omni"];
		const which = { families: [...drawnFamilies, ...pictures], count: full ? 6 : 1, seed: 3, first: 0 };
		for await (const one of meetFamilies(python!, { ...which, onLayouts: full, keep: null })) drawn.push(one);
		expect(drawn.filter(({ state }) => state !== "ok")).toEqual([]);
		expect(drawn.length).toBe(which.families.length * which.count);
	},
	600_000,
);
