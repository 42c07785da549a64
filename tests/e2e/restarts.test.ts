/** Runs that restart in their job after faults (tests/attack/restarts.ts): nothing of their training is lost, and no bit is another. */
import { expect, test } from "bun:test";
import { layouts, numbers } from "../attack/fault-plan.ts";
import { drawCauses, meetRestarts } from "../attack/restarts.ts";

test("two ranks: one is killed, and the other while it is replaced", async () => {
	const { recoveries, problems } = await meetRestarts(layouts[0]!, ["again"], { seed: 1, spares: 1 });
	expect(problems).toEqual([]);
	expect(recoveries.map(({ lost }) => lost)).toEqual([0]);
}, 120_000);

if (process.env.MIMO_TEST_FULL === "1") {
	test.each(layouts.filter(({ ranks }) => ranks === 4))(
		"50 faults of $name",
		async (layout) => {
			const { recoveries, problems } = await meetRestarts(layout, drawCauses(50, numbers(20261128)), {
				seed: 2,
				spares: 1,
			});
			expect([problems, recoveries.filter(({ lost, cause }) => lost > 0 && cause !== "launcher")]).toEqual([[], []]);
			expect(recoveries).toHaveLength(50);
		},
		1_800_000,
	);
}
