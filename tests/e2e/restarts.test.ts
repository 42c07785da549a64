/** Runs that restart in their job after faults (tests/attack/restarts.ts): nothing of their training is lost, and no bit is another. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { canMount, mountNamespace } from "../absent.ts";
import { layouts, numbers } from "../attack/fault-plan.ts";
import { drawCauses, kinds, meetRestarts } from "../attack/restarts.ts";
import { canTurnBits } from "../attack/wrong-bit.ts";
import { executable } from "../commands/mimo.ts";
import { freePort } from "../launch/launched.ts";
import { SmallRun } from "./small-run.ts";

test("two ranks: one is killed, and the other while it is replaced", async () => {
	const { recoveries, problems } = await meetRestarts(layouts[0]!, ["again"], { seed: 1, spares: 1 });
	expect(problems).toEqual([]);
	expect(recoveries.map(({ lost }) => lost)).toEqual([0]);
}, 120_000);

test("ranks whose launcher is killed save the step that they are in, those too that write to it", async () => {
	// Spare processes take the places of both ranks, so that the reporting one writes through the launcher.
	const faults = ["all ranks", "launcher"] as const;
	const { recoveries, problems } = await meetRestarts(layouts[0]!, faults, { seed: 3, spares: 2 });
	expect(problems).toEqual([]);
	expect(recoveries.map(({ lost }) => lost)).toEqual([0, 0]);
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

test.skipIf(!canMount())(
	"without room for a second copy the run goes on, and keeps the first ones",
	async () => {
		using run = new SmallRun();
		const port = await freePort();
		const small =
			"--preset nemotron-tiny --hidden-size 64 --seq-length 32 --data-path text.txt --device cpu --threads 1";
		const keeps = "--max-restarts 3 --non-persistent-save-interval 1 --replication";
		// The copies of both ranks take 27 MB, and second ones as much.
		const script = `mount -t tmpfs -o size=44m tmpfs /dev/shm && for host in 0 1; do
		NODE_RANK=$host "$@" > out$host 2> errors$host & done; wait $! && wait`;
		const flags = `train ${small} --llm-dp 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 ${keeps}`.split(
			" ",
		);
		const child = Bun.spawnSync([...mountNamespace, "sh", "-c", script, "sh", executable, ...flags], {
			cwd: run.folder,
			env: {
				...process.env,
				...{ NNODES: "2", NPROC_PER_NODE: "1", MASTER_ADDR: "127.0.0.1", MASTER_PORT: String(port), MIMO_SECRET: "a" },
			},
		});
		const errors = ["errors0", "errors1"].map((name) => readFileSync(run.path(name), "utf8"));
		const lacks = (rank: number) =>
			`What rank ${rank} keeps has no room in the memory of the next host: from step 1 on it is lost with its host.\n`;
		expect([child.exitCode, errors]).toEqual([0, [lacks(1), lacks(0)]]);
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
			expect([problems, recoveries.filter(({ lost }) => lost > 0)]).toEqual([[], []]);
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
