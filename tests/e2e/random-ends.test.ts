/**
 * Runs that meet a fault (tests/attack/fault-plan.ts): they end in time with the right cause named, and leave no
 * processes or memory behind. The seed is fixed; how far a run is when it is hit is up to the machine.
 */
import { expect, test } from "bun:test";
import { drawFaults } from "../attack/fault-plan.ts";
import { meetFaults, possibleHere } from "../attack/faults.ts";

const count = process.env.MIMO_TEST_FULL === "1" ? 200 : 5;

test(`${count} random ends`, async () => {
	// Two runs at a time: a stopped rank is only known to be silent after some seconds, in which nothing happens.
	const outcomes = await meetFaults(drawFaults(count, 20260131, possibleHere()), 2);
	expect(outcomes.filter(({ problems }) => problems.length > 0)).toEqual([]);
	expect(outcomes).toHaveLength(count);
}, 3_000_000);
