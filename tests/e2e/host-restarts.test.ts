/** Runs over played hosts that restart after faults (tests/attack/restarts.ts). */
import { describe, expect, test } from "bun:test";
import { layouts, numbers } from "../attack/fault-plan.ts";
import { drawCauses, meetRestarts } from "../attack/restarts.ts";
import { canPlayHosts } from "../launch/played-hosts.ts";

describe.skipIf(!canPlayHosts())("on played hosts", () => {
	const options = { seed: 1, spares: 1, hosts: 3 };

	test("three, of which one is spare: a rank is killed, a link is cut, and the first host is lost", async () => {
		const { problems, recoveries } = await meetRestarts(layouts[1]!, ["kill", "cut", "first host"], options);
		expect(problems).toEqual([]);
		expect(recoveries.map(({ lost }) => lost)).toEqual([0, 0, 0]);
	}, 300_000);

	test("a run of two hosts goes on with half of its lanes while one is lost, and grows again", async () => {
		const elastic = { seed: 2, spares: 0, hosts: 2, minLanes: 2, tolerance: 1e-4 };
		const { problems, recoveries } = await meetRestarts(layouts[1]!, ["host", "kill"], elastic);
		expect(problems).toEqual([]);
		// Steps since the newest checkpoint are done again.
		expect(recoveries[0]!.lost).toBeLessThanOrEqual(4);
	}, 300_000);

	if (process.env.MIMO_TEST_FULL === "1") {
		test.each(layouts.filter(({ ranks }) => ranks === 4))(
			"25 faults of $name",
			async (layout) => {
				const faults = drawCauses(25, numbers(20261129), "three");
				const { problems, recoveries } = await meetRestarts(layout, faults, options);
				expect([problems, recoveries.filter(({ lost }) => lost > 0)]).toEqual([[], []]);
				expect(recoveries).toHaveLength(25);
			},
			1_800_000,
		);
	}
});
