/** Launching ranks as processes, and every way in which a rank may end too soon. */
import { afterEach, describe, expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { canMount, mountNamespace } from "../absent.ts";
import { alive, type Ended, Launched, survivors } from "./launched.ts";

let started: Launched[] = [];
function start(...args: Parameters<typeof Launched.start>): Launched {
	const launched = Launched.start(...args);
	started.push(launched);
	return launched;
}

/** After every test no rank lives, and /dev/shm is empty. */
afterEach(async () => {
	const pids = started.flatMap((launched) => launched.pids);
	for (const { process } of started) process.kill("SIGKILL");
	started = [];
	expect(await survivors(pids)).toEqual([]);
	expect(readdirSync("/dev/shm").filter((name) => name.startsWith("mimo-run"))).toEqual([]);
});

/** The output of a run in which `ranks` ranks are about to wait for the paused one. */
const allWait = (ranks: number) => new RegExp(`(?:^.*waits for rank \\d+$[\\s\\S]*?){${ranks}}`, "m");

/** Checks that every failed run must pass. */
function expectDiagnosis(ended: Ended, first: RegExp, others: readonly RegExp[] = []): void {
	const diagnosis = ended.stderr.slice(ended.stderr.indexOf("mimo: ")).trimEnd().split("\n");
	expect(diagnosis[0]).toMatch(first);
	for (const line of others) expect(diagnosis.slice(1).join("\n")).toMatch(line);
	expect(ended.stderr.match(/^mimo: /gm)).toHaveLength(1);
	expect(ended.exitCode).toBe(1);
	expect(ended.seconds).toBeLessThan(10);
}

describe("a run that ends well", () => {
	test("prints its processes, prefixes the output of other ranks, and ends with 0", async () => {
		const launched = start([3, "chatty"]);
		const ended = await launched.end();
		expect(ended).toMatchObject({ exitCode: 0, stderr: "" });
		expect(ended.stdout).toMatch(/^rank 0: pid \d+ \(language, tp 0 dp 0\)\nrank 1: pid \d+ \(language, tp 1 dp 0\)\n/);
		// Lines of the reporting rank may stand between them.
		const ofRank1 = ended.stdout.split("\n").filter((line) => line.startsWith("[rank 1 language]"));
		expect(ofRank1).toEqual(["[rank 1 language] a line", "[rank 1 language] of a rank that does not report"]);
		expect(ended.stdout).toMatch(/^done: 3 ranks, 4 steps$/m);
		expect(new Set(launched.pids).size).toBe(3);
	});
});

describe("a signal that requests an early end", () => {
	for (const signal of ["SIGTERM", "SIGUSR1"] as const) {
		test(`${signal} to the launcher reaches every rank, all stop after the same step, exit code 75`, async () => {
			const launched = start([4, "asked"]);
			await launched.said(/two steps are done/);
			launched.signal(launched.process.pid, signal);
			expect(await launched.end()).toMatchObject({ exitCode: 75, stderr: "" });
		}, 30_000);
	}

	test("to a single rank stops all ranks", async () => {
		const launched = start([3, "asked"]);
		await launched.said(/two steps are done/);
		launched.signal(launched.pids[1]!, "SIGTERM");
		expect(await launched.end()).toMatchObject({ exitCode: 75, stderr: "" });
	}, 30_000);
});

describe("a rank killed by SIGKILL", () => {
	for (const [phase, where] of [
		["forward", /rank 0 .* waited in language\.dp all_reduce 2 \(4 bytes\) for rank 2\./],
		["optimizer", /rank 0 .* waited in world barrier 4 \(0 bytes\) for rank 2\./],
	] as const) {
		test(`in ${phase} ends all, with one diagnosis`, async () => {
			const launched = start([4, "pause", 2, phase]);
			const [, pid] = await launched.said(/paused in \w+ \(rank 2, pid (\d+)\)/);
			await launched.said(allWait(3));
			await Bun.sleep(100);
			launched.signal(Number(pid), "SIGKILL");
			const first = new RegExp(
				`^mimo: rank 2 \\(language, tp 0 dp 1; host \\S+, process ${pid}\\) failed: it was killed by SIGKILL \\(after step 1`,
			);
			expectDiagnosis(await launched.end(), first, [where]);
		}, 30_000);
	}

	test("in a collective is named with the collective", async () => {
		const launched = start([4, "pause", 1, "forward"]);
		await launched.said(/paused in forward \(rank 1/);
		await launched.said(allWait(3));
		await Bun.sleep(100);
		// Rank 3 waits for rank 1 of its group.
		launched.signal(launched.pids[3]!, "SIGKILL");
		expectDiagnosis(
			await launched.end(),
			/^mimo: rank 3 .* failed: it was killed by SIGKILL \(after step 1, in language\.dp all_reduce 2 \(4 bytes\)\)\.$/,
			[/rank 1 .* was busy, after world barrier 2 \(0 bytes\)\.$/m, /rank 0 .* waited in world .* for ranks 1, 3\.$/m],
		);
	}, 30_000);

	test("before all ranks have joined ends all", async () => {
		const launched = start([3, "rendezvous", 1]);
		const [, pid] = await launched.said(/paused in rendezvous \(rank 1, pid (\d+)\)/);
		launched.signal(Number(pid), "SIGKILL");
		const ended = await launched.end();
		expectDiagnosis(ended, /^mimo: rank 1 .* failed: it was killed by SIGKILL \(before it joined\)\.$/, [
			/rank 0 .* had not joined\.$/m,
		]);
	}, 30_000);
});

test("a rank that crashes while it waits in the rendezvous is named once, with its signal", async () => {
	const launched = start([3, "rendezvous", 1]);
	await launched.said(/paused in rendezvous \(rank 1/);
	await Bun.sleep(500);
	launched.signal(launched.pids[0]!, "SIGABRT");
	const ended = await launched.end();
	expectDiagnosis(ended, /^mimo: rank 0 .* failed: it was killed by SIGABRT \(before it joined\)\.$/);
	expect(ended.stderr.match(/mimo: /g)).toHaveLength(1);
}, 30_000);

describe("a rank stopped by SIGSTOP", () => {
	test("counts as failed and is ended", async () => {
		const launched = start([3, "pause", 1, "forward"]);
		const [, pid] = await launched.said(/paused in forward \(rank 1, pid (\d+)\)/);
		launched.signal(Number(pid), "SIGSTOP");
		expectDiagnosis(await launched.end(), /^mimo: rank 1 .* failed: it was stopped \(SIGSTOP or SIGTSTP\) for 5 s/, [
			/rank 0 .* waited in world all_reduce 3 \(16000000 bytes\) for rank 1\./,
		]);
	}, 30_000);

	test("counts as failed before all ranks have joined, too", async () => {
		const launched = start([2, "rendezvous", 0]);
		const [, pid] = await launched.said(/paused in rendezvous \(rank 0, pid (\d+)\)/);
		launched.signal(Number(pid), "SIGSTOP");
		expectDiagnosis(await launched.end(), /^mimo: rank 0 .* failed: it was stopped .*\(before it joined\)\.$/);
	}, 30_000);
});

describe("a rank that fails by itself", () => {
	test("with an error ends all", async () => {
		const ended = await start([3, "throw", 2, "optimizer"]).end();
		expectDiagnosis(ended, /^mimo: rank 2 .* failed: Sample 17 of images\.tar holds no image \(after step 1,/, [
			/rank 0 .* (waited in world .* for ranks? .*|was busy, after world .*)\.$/m,
		]);
		expect(ended.stderr).not.toContain("error:");
	}, 30_000);

	test("by ending before its work is done ends all", async () => {
		const ended = await start([2, "exit", 0, "forward"]).end();
		expectDiagnosis(ended, /^mimo: rank 0 .* failed: it ended before its work was done/);
	}, 30_000);

	test("by crashing ends all", async () => {
		const ended = await start([2, "abort", 1, "forward"]).end();
		expectDiagnosis(ended, /^mimo: rank 1 .* failed: it was killed by SIG(ABRT|TRAP|ILL|SEGV)/);
	}, 30_000);

	test("by calling another collective than the others ends all", async () => {
		const ended = await start([2, "mismatch", 1]).end();
		expectDiagnosis(
			ended,
			/^mimo: rank [01] .* failed: The members of world call different collectives: rank [01] (all_reduce|barrier) 4 /,
		);
	}, 30_000);

	test("by living without progress ends all", async () => {
		// Also how long ranks may take to join: a start on a busy machine, or on a GPU, takes some seconds.
		const launched = start([3, "pause", 1, "forward"], { TEST_TIMEOUT_MINUTES: "0.1" });
		await launched.said(/paused in forward/);
		launched.restartClock();
		expectDiagnosis(
			await launched.end(),
			/^mimo: rank 1 .* failed: it is alive but made no progress for 0\.1 minutes/,
			[
				/rank 0 .* waited in world all_reduce 3 \(16000000 bytes\) for rank 1\./,
				/rank 2 .* waited in world all_reduce 3 \(16000000 bytes\) for rank 1\./,
			],
		);
	}, 30_000);
});

describe("the launcher", () => {
	test("ends its ranks when it is killed", async () => {
		const launched = start([3, "pause", 1, "forward"]);
		await launched.said(/paused in forward/);
		const { pids } = launched;
		expect(pids.every(alive)).toBe(true);
		launched.signal(launched.process.pid, "SIGKILL");
		expect((await launched.end()).signal).toBe("SIGKILL");
		expect(await survivors(pids)).toEqual([]);
	}, 30_000);

	for (const [what, hit] of [
		["killed", "SIGKILL"],
		["stopped", "SIGSTOP"],
	] as const) {
		test(`is stopped, then a rank is ${what}: the other ranks end and print the diagnosis`, async () => {
			const launched = start([3, "pause", 1, "forward"]);
			await launched.said(/paused in forward/);
			await Bun.sleep(300);
			launched.signal(launched.process.pid, "SIGSTOP");
			const { pids } = launched;
			process.kill(pids[2]!, hit);
			await launched.said(
				/^mimo: rank 2 \(language, tp 0 dp 1; .*\) failed: it was (killed by SIGKILL|stopped \(SIGSTOP or SIGTSTP\) for 5 s) \(after step 1/m,
			);
			expect(await survivors(pids)).toEqual([]);
			expect(launched.seconds).toBeLessThan(11);
			// It prints no diagnosis when it continues.
			process.kill(launched.process.pid, "SIGCONT");
			const ended = await launched.end();
			expect(ended.stderr.match(/^mimo: /gm)).toHaveLength(1);
			expect(ended.exitCode).toBe(1);
		}, 60_000);
	}

	test("ends its ranks when the same signal comes again", async () => {
		const launched = start([3, "deaf", 1, "forward"]);
		await launched.said(/paused in forward/);
		launched.signal(launched.process.pid, "SIGTERM");
		await Bun.sleep(300);
		launched.signal(launched.process.pid, "SIGTERM");
		const ended = await launched.end();
		expect(ended).toMatchObject({ exitCode: 143, stderr: "mimo: The run was interrupted by SIGTERM.\n" });
		expect(ended.seconds).toBeLessThan(5);
	}, 30_000);

	for (const [signal, exitCode] of [
		["SIGINT", 130],
		["SIGTERM", 143],
	] as const) {
		test(`forwards ${signal} to its ranks`, async () => {
			const launched = start([3, "pause", 1, "forward"]);
			await launched.said(/paused in forward/);
			launched.signal(launched.process.pid, signal);
			const ended = await launched.end();
			expect(ended).toMatchObject({ exitCode, stderr: `mimo: The run was interrupted by ${signal}.\n` });
			expect(ended.seconds).toBeLessThan(10);
		}, 30_000);
	}
});

describe("a full /dev/shm", () => {
	const mounts = canMount();
	const small = (size: string) => [
		...mountNamespace,
		"sh",
		"-c",
		`mount -t tmpfs -o size=${size} tmpfs /dev/shm && exec "$@"`,
		"sh",
	];

	test.skipIf(!mounts)(
		"is named when the run does not fit",
		async () => {
			const ended = await start([2], {}, small("64k")).end();
			expect(ended.stderr).toMatch(
				/^mimo: \/dev\/shm is full: the control memory of the run needs \S+ MB, \S+ MB of \S+ MB are free\./,
			);
			expect(ended.exitCode).not.toBe(0);
		},
		30_000,
	);

	test.skipIf(!mounts)(
		"is named when a group does not fit",
		async () => {
			const ended = await start([2], {}, small("800k")).end();
			expectDiagnosis(
				ended,
				/^mimo: rank [01] .* failed: \/dev\/shm is full: the group world needs 1\.\d MB, 0\.\d MB of 0\.8 MB are free\./,
			);
		},
		30_000,
	);
});
