/**
 * Runs of two hosts, played by processes of one machine whose NCCL_HOSTID names the host. The tests mostly wait, so they run
 * concurrently.
 */
import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { hostsOf } from "../../src/launch/hosts.ts";
import { alive, type Ended, freePort, Launched } from "./launched.ts";

const started: Launched[] = [];
afterAll(async () => {
	for (const { process } of started) process.kill("SIGKILL");
	await Promise.all(started.map(({ process }) => process.exited));
	expect(started.map(({ process }) => process.pid).filter(alive)).toEqual([]);
});

/** Ranks 0 and 1 on host "a", 2 and 3 on "b". */
async function startRanks(...args: readonly (string | number)[]): Promise<Launched[]> {
	const port = await freePort();
	const program = join(import.meta.dir, "hosts-program.ts");
	const ranks = [0, 1, 2, 3].map((rank) =>
		Launched.run([process.execPath, program, ...args.map(String)], {
			env: {
				RANK: String(rank),
				WORLD_SIZE: "4",
				LOCAL_RANK: String(rank % 2),
				LOCAL_WORLD_SIZE: "2",
				MASTER_ADDR: "127.0.0.1",
				MASTER_PORT: String(port),
				MIMO_SECRET: "of the test",
				NCCL_HOSTID: rank < 2 ? "a" : "b",
			},
		}),
	);
	started.push(...ranks);
	if (args[0] === "wait") {
		for (const [rank, one] of ranks.entries()) await one.said(RegExp(`rank ${rank} has joined`));
	}
	return ranks;
}

function endOfAll(ranks: readonly Launched[]): Promise<Ended[]> {
	return Promise.all(ranks.map((rank) => rank.end()));
}

/** The diagnosis that all ranks printed. */
function diagnoses(ended: readonly Ended[]): string[] {
	return ended.flatMap(({ stderr }) => stderr.match(/^mimo: .*$/gm) ?? []);
}

test("hosts are numbered in the order of their first ranks", () => {
	const machines = ["n1", "n1", "n7", "n2", "n7", "n1"].map((machine) => ({ machine }));
	expect(hostsOf(machines)).toEqual([0, 0, 1, 2, 1, 0]);
});

test.concurrent("hosts wait for each other's ranks, and leave no shared memory", async () => {
	const ended = await endOfAll(await startRanks("finish"));
	expect(ended.map(({ exitCode, stderr }) => ({ exitCode, stderr }))).toEqual(
		Array.from({ length: 4 }, () => ({ exitCode: 0, stderr: "" })),
	);
}, 30_000);

test.concurrent("an error is printed once, by the host of rank 0, with the states of the other ranks", async () => {
	const ended = await endOfAll(await startRanks("throw", 3));
	expect(diagnoses(ended)).toEqual([
		expect.stringMatching(/^mimo: rank 3 \(language, dp 3; .*\) failed: Sample 17 of images\.tar holds no image/),
	]);
	expect(ended[0]!.stderr + ended[1]!.stderr).toMatch(/^ {2}rank 2 \(language, dp 2; host .*, process \d+\) was busy/m);
	expect(ended.map(({ exitCode }) => exitCode)).toEqual([69, 69, 69, 1]);
}, 30_000);

const kills: readonly [name: string, rank: number, failure: RegExp][] = [
	["a rank of another host", 3, /its process has ended|it was killed by SIGKILL/],
	["the one that passes on for its host", 2, /its process has ended|it was killed by SIGKILL/],
	["rank 0", 0, /its process has ended|it was killed by SIGKILL/],
];
for (const [name, rank, failure] of kills) {
	test.concurrent(`${name} is killed: all ranks end, and the diagnosis names it`, async () => {
		const ranks = await startRanks("wait");
		for (const one of ranks) one.signal(ranks[rank]!.process.pid, "SIGKILL");
		const ended = await endOfAll(ranks);
		const said = diagnoses(ended);
		// Where the host of rank 0 may be lost, the next host prints the diagnosis too.
		expect(said.length).toBeGreaterThanOrEqual(1);
		expect(said.length).toBeLessThanOrEqual(rank === 0 ? 2 : 1);
		for (const sentence of said) {
			expect(sentence).toStartWith(`mimo: rank ${rank} (language, dp ${rank}; host `);
			expect(sentence).toMatch(failure);
		}
		expect(ended.map(({ exitCode }) => exitCode).filter((_, other) => other !== rank)).toEqual([69, 69, 69]);
		expect(Math.max(...ended.map(({ seconds }) => seconds))).toBeLessThan(10);
	}, 30_000);
}

for (const rank of [0, 2, 3]) {
	test.concurrent(`rank ${rank} is stopped: the other ranks end, and the diagnosis names it`, async () => {
		const ranks = await startRanks("wait");
		for (const one of ranks) one.signal(ranks[rank]!.process.pid, "SIGSTOP");
		const others = ranks.filter((_, other) => other !== rank);
		const ended = await endOfAll(others);
		const said = diagnoses(ended);
		expect(said.length).toBeGreaterThanOrEqual(1);
		for (const sentence of said) {
			expect(sentence).toStartWith(`mimo: rank ${rank} (language, dp ${rank}; host `);
			expect(sentence).toMatch(/it was stopped|silent for 5 s/);
		}
		expect(Math.max(...ended.map(({ seconds }) => seconds))).toBeLessThan(10);
		ranks[rank]!.process.kill("SIGKILL");
	}, 60_000);
}
