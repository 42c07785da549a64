/** Ranks without our launcher: they meet by torchrun's variables and watch each other. */
import { afterEach, expect, test } from "bun:test";
import { createServer, type Server } from "node:net";
import { alive, type Ended, freePort, Launched } from "./launched.ts";

let started: Launched[] = [];
const servers: Server[] = [];
afterEach(async () => {
	const pids = started.map(({ process }) => process.pid);
	for (const { process } of started) process.kill("SIGKILL");
	for (const server of servers.splice(0)) server.close();
	await Promise.all(started.map(({ process }) => process.exited));
	started = [];
	expect(pids.filter(alive)).toEqual([]);
});

/** Starts rank `rank` of `ranks` as torchrun does. */
function startRank(
	rank: number,
	ranks: number,
	port: number,
	args: readonly (string | number)[] = [],
	env: Record<string, string> = {},
): Launched {
	const launched = Launched.start([ranks, ...args], {
		RANK: String(rank),
		WORLD_SIZE: String(ranks),
		LOCAL_RANK: String(rank),
		MASTER_ADDR: "127.0.0.1",
		MASTER_PORT: String(port),
		...env,
	});
	started.push(launched);
	return launched;
}

function endOfAll(ranks: readonly Launched[]): Promise<Ended[]> {
	return Promise.all(ranks.map((rank) => rank.end()));
}

test("ranks join through torchrun's variables and work together", async () => {
	const port = await freePort();
	const ended = await endOfAll([2, 1, 0].map((rank) => startRank(rank, 3, port)));
	expect(ended.map(({ exitCode, stderr }) => ({ exitCode, stderr }))).toEqual(
		Array.from({ length: 3 }, () => ({ exitCode: 0, stderr: "" })),
	);
	expect(ended[0]!.stdout).toBe("done: 3 ranks, 4 steps\n");
}, 30_000);

test("a killed rank ends the others, and one rank prints the diagnosis", async () => {
	const port = await freePort();
	const ranks = [0, 1, 2].map((rank) => startRank(rank, 3, port, ["pause", 1, "forward"]));
	await Promise.all([
		ranks[1]!.said(/paused in forward/),
		...[0, 2].map((rank) => ranks[rank]!.said(/waits for rank 1$/m)),
	]);
	await Bun.sleep(100);
	for (const rank of ranks) rank.signal(ranks[1]!.process.pid, "SIGKILL");
	const ended = await endOfAll(ranks);
	const diagnosis = ended.map(({ stderr }) => stderr).join("");
	expect(diagnosis).toMatch(
		/^mimo: rank 1 \(language, tp 1 dp 0; host \S+, process \d+\) failed: (its process has ended|it was killed by SIGKILL) /,
	);
	expect(diagnosis).toMatch(/^ {2}rank 0 .* waited in world all_reduce 3 \(16000000 bytes\) for rank 1\.$/m);
	expect(diagnosis.match(/^mimo: /gm)).toHaveLength(1);
	expect([ended[0]!.exitCode, ended[2]!.exitCode]).toEqual([69, 69]);
	expect(Math.max(...ended.map(({ seconds }) => seconds))).toBeLessThan(10);
}, 30_000);

test("the heartbeat thread ends a rank whose training thread computes, with the diagnosis", async () => {
	const port = await freePort();
	const ranks = [0, 1].map((rank) => startRank(rank, 2, port, ["pause", 0, "forward"]));
	await ranks[0]!.said(/paused in forward/);
	for (const rank of ranks) rank.signal(ranks[1]!.process.pid, "SIGKILL");
	const [ended] = await endOfAll(ranks);
	// Rank 1 may be killed before it comes as far as rank 0.
	expect(ended!.stderr).toMatch(
		/^mimo: rank 1 \(language, tp 1 dp 0; host \S+, process \d+\) failed: (its process has ended|it was killed by SIGKILL) \((after step 1|in its first step), /,
	);
	expect(ended!.stderr.match(/^mimo: /gm)).toHaveLength(1);
	expect([ended!.exitCode, ended!.signal]).toEqual([69, null]);
	expect(ended!.seconds).toBeLessThan(10);
}, 30_000);

test("a stopped rank ends the others", async () => {
	const port = await freePort();
	const ranks = [0, 1].map((rank) => startRank(rank, 2, port, ["pause", 0, "optimizer"]));
	await ranks[0]!.said(/paused in optimizer/);
	ranks[1]!.signal(ranks[0]!.process.pid, "SIGSTOP");
	const ended = await ranks[1]!.end();
	expect(ended.stderr).toMatch(/^mimo: rank 0 .* failed: it was stopped \(SIGSTOP or SIGTSTP\) for 5 s/);
	expect(ended.seconds).toBeLessThan(10);
	// No other process would end it.
	expect(await ranks[0]!.end()).toMatchObject({ exitCode: null, signal: "SIGKILL" });
}, 30_000);

test("an error of one rank is printed once", async () => {
	const port = await freePort();
	const ended = await endOfAll([0, 1].map((rank) => startRank(rank, 2, port, ["throw", 1, "forward"])));
	const diagnosis = ended.map(({ stderr }) => stderr).join("");
	expect(diagnosis.match(/^mimo: .*$/gm)).toEqual([
		expect.stringMatching(/^mimo: rank 1 .* failed: Sample 17 of images\.tar holds no image/),
	]);
	expect(ended.map(({ exitCode }) => exitCode)).toEqual([69, 1]);
}, 30_000);

test("a rank with another configuration is refused by name and value", async () => {
	const port = await freePort();
	const ended = await endOfAll([startRank(0, 2, port), startRank(1, 2, port, [], { TEST_LLM_TP: "1" })]);
	const sentence =
		/^mimo: rank 1 \(host \S+, process \d+\) has another configuration than rank 0 \(host \S+, process \d+\): llm-tp 1 instead of 2\.\n$/;
	for (const { exitCode, stderr } of ended) {
		expect(stderr).toMatch(sentence);
		expect(exitCode).toBe(1);
	}
}, 30_000);

test("rank 0 names a port in use, and the other ranks the program that listens there", async () => {
	const server = createServer((socket) => socket.on("error", () => {}).end("220 mail\r\n"));
	await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
	servers.push(server);
	const { port } = server.address() as { port: number };
	const [zero, one] = await endOfAll([0, 1].map((rank) => startRank(rank, 2, port)));
	expect(zero).toMatchObject({
		exitCode: 1,
		stderr: `mimo: Port ${port} of 127.0.0.1, where the ranks should meet, is in use by another program; give another MASTER_PORT.\n`,
	});
	expect(one).toMatchObject({
		exitCode: 1,
		stderr: `mimo: The program that listens at 127.0.0.1:${port} is not a rendezvous of mimo; give another MASTER_PORT.\n`,
	});
}, 30_000);

test("the number of ranks must equal the configuration's", async () => {
	const ended = await startRank(0, 3, 29500, [], { WORLD_SIZE: "4" }).end();
	expect(ended).toMatchObject({
		exitCode: 2,
		stderr: "mimo: The configuration needs 3 ranks, but WORLD_SIZE is 4.\n",
	});
}, 30_000);
