/** Checkpoints of `mimo train` after signals, kills, damage and full disks, and those that --keep removes. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, existsSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { canMount, mountNamespace } from "../absent.ts";
import { executable } from "../commands/mimo.ts";
import { Launched, survivors } from "../launch/launched.ts";
import { CheckpointRuns, type LayoutName, reference } from "./checkpoint-runs.ts";

const runs = new CheckpointRuns();
beforeAll(() => runs.trainWhole(), 120_000);
afterAll(() => runs[Symbol.dispose]());

describe("damage", () => {
	test("an altered newest checkpoint is named; --allow-fallback takes the one before", () => {
		cpSync(runs.path("whole"), runs.path("altered"), { recursive: true });
		const data = runs.path("altered/iter_0000004/data");
		const file = join(data, readdirSync(data).sort()[0]!);
		const bytes = readFileSync(file);
		bytes[bytes.length - 5]! ^= 1;
		writeFileSync(file, bytes);
		const common = "--train-iters 4 --load altered --save altered-again --save-interval 100 --log-json altered.jsonl";
		const refused = runs.train(reference, common);
		expect(refused.exitCode).toBe(1);
		expect(refused.stderr).toMatch(
			/altered\/iter_0000004\/data\/r00000-000\.safetensors is damaged: the checksum of tensor \S+ differs\. The newest good checkpoint is altered\/iter_0000002 \(--allow-fallback takes it\)/,
		);
		const taken = runs.train(reference, `${common} --allow-fallback`);
		expect(taken.exitCode).toBe(0);
		expect(taken.stderr).toContain("Going on from altered/iter_0000002, an older checkpoint (--allow-fallback).");
		expect(runs.digests("altered-again")).toEqual(runs.digests("whole"));
	}, 120_000);
});

test("old checkpoints go: --keep and --save-retain-interval", () => {
	runs.trainWell("colocated", "--train-iters 7 --save kept --save-interval 1 --keep 2 --save-retain-interval 3");
	expect(readdirSync(runs.path("kept")).sort()).toEqual([
		"iter_0000003",
		"iter_0000006",
		"iter_0000007",
		"latest.json",
	]);
}, 60_000);

describe("processes that end", () => {
	let started: Launched | null = null;
	const start = (layout: LayoutName, more: string) => {
		started = Launched.run([executable, ...runs.flags(layout, more)], { cwd: runs.folder });
		return started;
	};
	/** Signals a run that computes, and waits for its end. */
	const interrupted = async (layout: LayoutName, common: string, signal: "SIGTERM" | "SIGINT") => {
		const launched = start(layout, `--train-iters 100000 ${common}`);
		await launched.said(/ iteration +2\//);
		launched.signal(launched.process.pid, signal);
		return await launched.end();
	};
	afterAll(() => {
		started?.process.kill("SIGKILL");
	});

	test("SIGTERM saves and exits with 75; the next run goes on", async () => {
		const common = "--save asked --load asked --save-interval 100 --exit-signal-handler --log-json asked.jsonl";
		const ended = await interrupted(reference, common, "SIGTERM");
		expect(ended.exitCode).toBe(75);
		const last = Number(/Stopped by SIG\w+ after step (\d+)\./.exec(ended.stdout)![1]) + 2;
		runs.trainWell(reference, `--train-iters ${last} ${common}`);
		runs.trainWell(reference, `--train-iters ${last} --log-json unasked.jsonl`);
		expect(runs.steps("asked.jsonl")).toEqual(runs.steps("unasked.jsonl"));
	}, 120_000);

	test("SIGINT saves and exits with 130; the next run goes on", async () => {
		const common = "--save broken --load broken --save-interval 100 --log-json broken.jsonl";
		const ended = await interrupted("1+1", common, "SIGINT");
		expect([ended.exitCode, ended.stderr]).toEqual([
			130,
			expect.stringContaining(" and saves a checkpoint; Ctrl-C again "),
		]);
		const stopped = /^Saved the checkpoint of step (\d+)[\s\S]*^Interrupted: stopped after step \1\.$/m;
		const last = Number(stopped.exec(ended.stdout)![1]) + 2;
		runs.trainWell("1+1", `--train-iters ${last} ${common}`);
		runs.trainWell("1+1", `--train-iters ${last} --log-json unbroken.jsonl`);
		expect(runs.steps("broken.jsonl")).toEqual(runs.steps("unbroken.jsonl"));
	}, 120_000);

	const kills = process.env.MIMO_TEST_FULL ? 50 : 2;
	const iterations = process.env.MIMO_TEST_FULL ? 400 : 12;
	test(`${kills} kills at random moments of steps and saves: nothing is lost, the log is that of one run`, async () => {
		runs.trainWell(reference, `--train-iters ${iterations} --log-json unkilled.jsonl`);
		let state = 11;
		for (let kill = 0; kill < kills; kill++) {
			const launched = start(
				reference,
				`--train-iters ${iterations} --save killed --load killed --save-interval 1 --keep 2 --async-save --log-json killed.jsonl`,
			);
			await launched.said(/ iteration +\d+\//);
			state = (state * 48271) % 2147483647;
			await Bun.sleep(state % 1200);
			// A fast machine may have ended the run by now.
			launched.process.kill("SIGKILL");
			await launched.end();
			expect(await survivors(launched.pids)).toEqual([]);
			if (!existsSync(runs.path("killed/latest.json"))) continue;
			using checkpoint = NativeCheckpoint.openExactly(runs.path("killed"));
			checkpoint.verify();
		}
		// The kills may all have come before the first checkpoint, or its name in latest.json: then the run says so.
		const { exitCode } = runs.train(
			reference,
			`--train-iters ${iterations} --save killed --load killed --save-interval 1 --keep 2 --async-save --log-json killed.jsonl`,
		);
		expect(exitCode).toBe(0);
		expect(runs.steps("killed.jsonl")).toEqual(runs.steps("unkilled.jsonl"));
	}, 1_800_000);
});

describe.skipIf(!canMount())("a full disk", () => {
	/** Trains with the folder `full` on a file system that has room for `checkpoints` checkpoints, after the command `before`. */
	function onFullDisk(more: string, checkpoints = 1.6, before: (bytes: number) => string = () => "true") {
		mkdirSync(runs.path("full"), { recursive: true });
		const checkpoint = runs.path("whole/iter_0000002");
		const files = readdirSync(checkpoint, { recursive: true }) as string[];
		const bytes = files.reduce((sum, file) => sum + statSync(join(checkpoint, file)).size, 0);
		const script = `mount -t tmpfs -o size=${Math.ceil(checkpoints * bytes)} tmpfs full && ${before(bytes)} && "$0" "$@"; code=$?; ls full; ls full/*; exit $code`;
		const command = [...mountNamespace, "sh", "-c", script, executable, ...runs.flags("1+1", more)];
		const { exitCode, stdout, stderr } = Bun.spawnSync(command, { cwd: runs.folder, stdout: "pipe", stderr: "pipe" });
		return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
	}

	test("ends the training with one sentence and keeps the checkpoint before", () => {
		const ended = onFullDisk("--train-iters 6 --save full --save-interval 2");
		expect(ended.exitCode).toBe(1);
		expect(ended.stderr).toMatch(
			/The checkpoint of step 4 was not saved: Cannot write full\/\S+: no space left on the device/,
		);
		expect(ended.stdout).toContain("Saved the checkpoint of step 2");
		expect(ended.stdout.slice(ended.stdout.lastIndexOf("Saved"))).toMatch(/\niter_0000002\nlatest\.json\n/);
	}, 60_000);

	test("that has no room for a checkpoint is refused before the first step", () => {
		const ended = onFullDisk("--train-iters 6 --save full --save-interval 2", 0.6);
		expect(ended.exitCode).toBe(1);
		expect(ended.stderr).toMatch(
			/^mimo: rank 0 .* failed: --save full: a checkpoint needs \S+ MB \(\d+ bytes\), but only \S+ .B \(\d+ bytes\) are free there /,
		);
		expect(ended.stdout).not.toContain("iteration");
	}, 60_000);

	test("that a killed save has filled has room: the next save removes what is left", () => {
		const leftover = (bytes: number) =>
			`mkdir full/iter_0000002.tmp-a && head -c ${Math.ceil(1.2 * bytes)} /dev/zero > full/iter_0000002.tmp-a/half`;
		const ended = onFullDisk("--train-iters 2 --save full --save-interval 2", 1.6, leftover);
		expect({ exitCode: ended.exitCode, stderr: ended.stderr }).toEqual({ exitCode: 0, stderr: "" });
		expect(ended.stdout).toContain("Saved the checkpoint of step 2");
	}, 60_000);

	test("with --save-retry training goes on", () => {
		const ended = onFullDisk("--train-iters 5 --save full --save-interval 2 --save-retry");
		expect(ended.stderr).toMatch(
			/The checkpoint of step 4 was not saved, training goes on: Cannot write full\/\S+: no space left/,
		);
		expect(ended.stdout).toMatch(/ iteration +5\/ /);
		expect([ended.exitCode, ended.stderr]).toEqual([
			1,
			expect.stringContaining("The checkpoint of step 5 was not saved"),
		]);
	}, 60_000);
});
