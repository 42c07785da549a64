/** Runs that restart in their job after faults (tests/attack/restarts.ts): nothing of their training is lost, and no bit is another. */
import { expect, test } from "bun:test";
import { layouts, numbers } from "../attack/fault-plan.ts";
import { drawCauses, kinds, meetRestarts } from "../attack/restarts.ts";
import { canTurnBits } from "../attack/wrong-bit.ts";
import { SmallRun } from "./small-run.ts";

test("two ranks: one is killed, and the other while it is replaced", async () => {
	const { recoveries, problems } = await meetRestarts(layouts[0]!, ["again"], { seed: 1, spares: 1 });
	expect(problems).toEqual([]);
	expect(recoveries.map(({ lost }) => lost)).toEqual([0]);
}, 120_000);

test.skipIf(!canTurnBits())(
	"a turned bit in a rank's memory is found, and the rank replaced",
	async () => {
		const { recoveries, problems } = await meetRestarts(layouts[0]!, ["wrong result"], { seed: 5, spares: 0 });
		expect(problems).toEqual([]);
		expect(recoveries.map(({ lost }) => lost)).toEqual([0]);
	},
	120_000,
);

test("an error that comes again in the same step ends the run", () => {
	using run = new SmallRun();
	const { exitCode, stderr } = run.train(
		"--lr 1e30 --train-iters 9 --max-restarts 9 --micro-batch-size 1 --global-batch-size 1".split(" "),
	);
	const failure =
		/^mimo: rank 0 \(language, tp 0 dp 0; .*\) failed: Step (\d): the (loss|gradient norm) is not finite; .* \(after step/;
	const [first, restart, second, refusal, ...rest] = stderr.trimEnd().split("\n");
	expect([first, second]).toEqual([expect.stringMatching(failure), expect.stringMatching(failure)]);
	expect(restart).toMatch(
		/^mimo: Restart 1 of at most 9 within 60 minutes: a new process for rank 0; all ranks have met /,
	);
	expect(refusal).toMatch(/^mimo: The run is not restarted: it has failed twice after step \d for the same reason\.$/);
	expect([exitCode, rest]).toEqual([1, []]);
}, 60_000);

if (process.env.MIMO_TEST_FULL === "1") {
	test.each(layouts.filter(({ ranks }) => ranks === 4))(
		"50 faults of $name",
		async (layout) => {
			const faults = drawCauses(50, numbers(20261128));
			const { recoveries, problems } = await meetRestarts(layout, faults, { seed: 2, spares: 1 });
			expect([problems, recoveries.filter(({ lost, cause }) => lost > 0 && cause !== "launcher")]).toEqual([[], []]);
			expect(recoveries).toHaveLength(50);
		},
		1_800_000,
	);

	test.each(kinds)(
		"faults of $name",
		async (layout) => {
			const faults = ["kill", "crash", "again", "kill"] as const;
			const { recoveries, problems } = await meetRestarts(layout, faults, { seed: 3, spares: 0 });
			expect([problems, recoveries.map(({ lost }) => lost)]).toEqual([[], [0, 0, 0, 0]]);
		},
		600_000,
	);

	test("without copies restarts go on from the newest checkpoint", async () => {
		const faults = ["kill", "all ranks", "again", "crash"] as const;
		const { problems } = await meetRestarts(layouts[1]!, faults, { seed: 4, spares: 0, copies: false });
		expect(problems).toEqual([]);
	}, 600_000);
}
