/**
 * Ranks that join a run, and ranks that are refused. Server and ranks talk over real sockets, in one process.
 */
import { afterEach, describe, expect, test } from "bun:test";
import { connect, createServer } from "node:net";
import { hostsOf, placementOf } from "../../src/launch/hosts.ts";
import { type Place, placeFromEnvironment } from "../../src/launch/place.ts";
import { joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import type { HostRequest, Identity } from "../../src/launch/rendezvous/messages.ts";
import { RendezvousServer } from "../../src/launch/rendezvous/server.ts";

const address = "127.0.0.1";
const secret = "a secret";
const open: Disposable[] = [];
afterEach(() => {
	for (const resource of open.splice(0)) resource[Symbol.dispose]();
});

function identity(rank: number | null, change: Partial<Identity> = {}): Identity {
	return {
		rank,
		worldSize: 3,
		host: "box",
		machine: "box 1",
		pid: 100 + (rank ?? 0),
		version: "0.1.0 (commit 0123456789ab)",
		abi: 2,
		library: "cpu",
		configuration: { "llm-tp": "2", seed: "1234" },
		...change,
	};
}

/** The server of rank 0 of three. */
async function serve(): Promise<RendezvousServer> {
	const opened = await RendezvousServer.open(address, 0, secret, identity(0));
	open.push(opened);
	return opened;
}

function join(port: number, of: Identity, change: Partial<Place> = {}, milliseconds = 5000): Promise<string> {
	const place = { rank: of.rank!, worldSize: 3, localRank: 0, localSize: 3, address, port, secret, launcher: null };
	return joinRendezvous({ ...place, ...change }, of, milliseconds, () => {
		throw new Error("No shared memory was to be requested.");
	});
}

async function hasJoined(server: RendezvousServer, rank: number): Promise<void> {
	while (!server.members.has(rank)) await Bun.sleep(5);
}

/** The request to the first rank of a host. */
function hostRequest(host: number, hostOfRank: readonly number[]): HostRequest {
	const parent = { address: null, port: 4711 };
	return { placement: placementOf(hostOfRank), host, parent, nonce: "ab".repeat(32) };
}

/** The message a promise is rejected with. */
async function refusal(promise: Promise<unknown>): Promise<string> {
	return await promise.then(
		(value) => `not refused: ${value}`,
		(error: Error) => error.message,
	);
}

test("ranks with the server's identity receive the path of the run's shared memory", async () => {
	const here = await serve();
	const ranks = [join(here.port, identity(1)), join(here.port, identity(2))];
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("/proc/1/fd/7");
	expect(await Promise.all(ranks)).toEqual(["/proc/1/fd/7", "/proc/1/fd/7"]);
});

test("the first rank of another machine is requested to create its shared memory", async () => {
	const [here, there] = [identity(0, { library: "cuda" }), { library: "cuda", machine: "box 2" }];
	const opened = await RendezvousServer.open(address, 0, secret, here);
	open.push(opened);
	const place = { worldSize: 3, localRank: 0, localSize: 1, address, port: opened.port, secret, launcher: null };
	const requests: unknown[] = [];
	const ranks = [1, 2].map((rank) =>
		joinRendezvous({ ...place, rank }, identity(rank, there), 5000, (request, from) => {
			requests.push([rank, request, from]);
			return { run: "/proc/101/fd/9", port: 4712 };
		}),
	);
	await opened.waitForRanks([1, 2], 5000);
	const hostOfRank = hostsOf([here, opened.members.get(1)!, opened.members.get(2)!]);
	expect(hostOfRank).toEqual([0, 1, 1]);
	const request = hostRequest(1, hostOfRank);
	const memory = await opened.requestHostMemory(1, request);
	expect(memory).toEqual({ run: "/proc/101/fd/9", port: 4712, address });
	opened.announceRun((rank) => (rank === 0 ? "/proc/1/fd/7" : memory.run));
	expect(await Promise.all(ranks)).toEqual(["/proc/101/fd/9", "/proc/101/fd/9"]);
	expect(requests).toEqual([[1, request, { host: address, own: address }]]);
});

test("a machine that cannot create its shared memory ends the run for all, in one sentence", async () => {
	const opened = await RendezvousServer.open(address, 0, secret, identity(0, { library: "cuda" }));
	open.push(opened);
	const place = { worldSize: 3, localRank: 0, localSize: 1, address, port: opened.port, secret, launcher: null };
	const rank = joinRendezvous({ ...place, rank: 1 }, identity(1, { library: "cuda", machine: "box 2" }), 5000, () => {
		throw new Error("/dev/shm is full.");
	});
	await opened.waitForRanks([1], 5000);
	const request = hostRequest(1, [0, 1, 1]);
	const reasons = await Promise.all([refusal(opened.requestHostMemory(1, request)), refusal(rank)]);
	expect(reasons).toEqual([
		"rank 1 (host box, process 101) could not create the run's shared memory on its host: /dev/shm is full.",
		"/dev/shm is full.",
	]);
});

test("the server may start later than the ranks", async () => {
	const first = await serve();
	const { port } = first;
	first[Symbol.dispose]();
	const rank = join(port, identity(1));
	await Bun.sleep(250);
	const later = await RendezvousServer.open(address, port, secret, identity(0));
	open.push(later);
	await later.waitForRanks([1], 5000);
	later.announceRun("here");
	expect(await rank).toBe("here");
});

describe("an incompatible rank ends the run for all, in one sentence", () => {
	const cases: readonly [string, Identity, string][] = [
		[
			"another configuration",
			identity(2, { configuration: { "llm-tp": "1", seed: "1234" } }),
			"rank 2 (host box, process 102) has another configuration than rank 0 (host box, process 100): llm-tp 1 instead of 2.",
		],
		[
			"another version",
			identity(2, { version: "0.2.0 (commit ba9876543210)" }),
			"rank 2 (host box, process 102) runs mimo 0.2.0 (commit ba9876543210), rank 0 (host box, process 100) runs 0.1.0 (commit 0123456789ab).",
		],
		[
			"another ABI",
			identity(2, { abi: 3 }),
			"rank 2 (host box, process 102) has ABI version 3, rank 0 (host box, process 100) has 2.",
		],
		[
			"another library",
			identity(2, { library: "cuda" }),
			"rank 2 (host box, process 102) uses the cuda library, rank 0 (host box, process 100) the cpu library.",
		],
		[
			"another number of ranks",
			identity(2, { worldSize: 4 }),
			"rank 2 (host box, process 102) expects 4 ranks, rank 0 (host box, process 100) expects 3.",
		],
		[
			"another host, on the CPU library",
			identity(2, { host: "far", machine: "far 1" }),
			"rank 2 (host far, process 102) and rank 0 (host box, process 100) are on different hosts: ranks of several hosts need NCCL (--device cuda), the CPU library joins ranks of one host.",
		],
		[
			"a rank that has joined already",
			identity(1, { pid: 999 }),
			"rank 1 (host box, process 999) and rank 1 (host box, process 101) are the same rank.",
		],
	];
	for (const [what, wrong, sentence] of cases) {
		test(what, async () => {
			const here = await serve();
			const gathering = refusal(here.waitForRanks([1, 2], 5000));
			const good = refusal(join(here.port, identity(1)));
			await hasJoined(here, 1);
			expect(await refusal(join(here.port, wrong))).toBe(sentence);
			expect(await gathering).toBe(sentence);
			expect(await good).toBe(sentence);
		});
	}
});

test("a rank with a wrong secret is refused, and the run starts without it", async () => {
	const here = await serve();
	const good = [join(here.port, identity(1)), join(here.port, identity(2))];
	expect(await refusal(join(here.port, identity(1), { secret: "another" }))).toBe(
		`The rendezvous at ${address}:${here.port} refused the secret of this rank (MIMO_SECRET): it is not that of the run.`,
	);
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("run");
	expect(await Promise.all(good)).toEqual(["run", "run"]);
});

test("a rank does not accept a server without the secret", async () => {
	const server = createServer((socket) => {
		socket.write(`${JSON.stringify({ program: "mimo", protocol: 4, challenge: "0".repeat(64) })}\n`);
		socket.once("data", () => {
			socket.write(`${JSON.stringify({ proof: "0".repeat(64) })}\n`);
			socket.write(`${JSON.stringify({ body: JSON.stringify({ run: "/trap" }), tag: "0".repeat(64) })}\n`);
		});
		socket.on("error", () => {});
	});
	await new Promise<void>((resolve) => server.listen(0, address, resolve));
	open.push({ [Symbol.dispose]: () => server.close() });
	const { port } = server.address() as { port: number };
	expect(await refusal(join(port, identity(1)))).toBe(
		`The rendezvous at ${address}:${port} does not have the secret of this run (MIMO_SECRET).`,
	);
});

test("other protocols, garbage and endless lines are refused", async () => {
	const here = await serve();
	for (const text of ["GET / HTTP/1.1\r\n\r\n", "{}\n", "x".repeat(3 << 20)]) {
		const socket = connect({ host: address, port: here.port });
		socket.on("error", () => {});
		socket.resume();
		const closed = new Promise((resolve) => socket.once("close", resolve));
		socket.write(text);
		await closed;
	}
	const ranks = [join(here.port, identity(1)), join(here.port, identity(2))];
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
});

test("absent ranks are named, also to the ranks that have joined", async () => {
	const here = await serve();
	const rank = refusal(join(here.port, identity(1)));
	await hasJoined(here, 1);
	const sentence = "Rank 2 did not join within 0 s.";
	expect(await refusal(here.waitForRanks([1, 2], 300))).toBe(sentence);
	expect(await rank).toBe(sentence);
});

test("a rank that disconnects before all have joined ends the run", async () => {
	const here = await serve();
	const gathering = refusal(here.waitForRanks([1, 2], 5000));
	const child = Bun.spawn([process.execPath, "-e", joiningRank(here.port)], { stdout: "inherit", stderr: "inherit" });
	await hasJoined(here, 1);
	child.kill();
	expect(await gathering).toMatch(/^rank 1 \(host box, process 101\) disconnected before all ranks had joined\.$/);
});

/** A program that joins as rank 1 and waits for the answer. */
function joiningRank(port: number): string {
	const place = { rank: 1, worldSize: 3, localRank: 1, localSize: 3, address, port, secret, launcher: null };
	const module = JSON.stringify(`${import.meta.dir}/../../src/launch/rendezvous/client.ts`);
	return `const { joinRendezvous } = await import(${module});
		await joinRendezvous(${JSON.stringify(place)}, ${JSON.stringify(identity(1))}, 5000, () => "");`;
}

describe("an address without the run's rendezvous", () => {
	test("names a port in use", async () => {
		const here = await serve();
		expect(await refusal(RendezvousServer.open(address, here.port, secret, identity(0)))).toBe(
			`Port ${here.port} of ${address}, where the ranks should meet, is in use by another program; give another MASTER_PORT.`,
		);
	});

	test("names an address of another host", async () => {
		expect(await refusal(RendezvousServer.open("203.0.113.7", 29500, secret, identity(0)))).toBe(
			"MASTER_ADDR 203.0.113.7 is not an address of this host, where rank 0 runs.",
		);
	});

	test("recognises another program", async () => {
		const server = createServer((socket) => {
			socket.on("error", () => {});
			socket.end("HTTP/1.1 400 Bad Request\r\n\r\n");
		});
		await new Promise<void>((resolve) => server.listen(0, address, resolve));
		open.push({ [Symbol.dispose]: () => server.close() });
		const { port } = server.address() as { port: number };
		expect(await refusal(join(port, identity(1)))).toBe(
			`The program that listens at ${address}:${port} is not a rendezvous of mimo; give another MASTER_PORT.`,
		);
	});

	test("names the port at which no process listens", async () => {
		const here = await serve();
		const { port } = here;
		here[Symbol.dispose]();
		expect(await refusal(join(port, identity(1), {}, 400))).toBe(
			`No process answers at ${address}:${port}, where the ranks should meet (ECONNREFUSED).`,
		);
	});
});

describe("the environment of a rank", () => {
	const torchrun = {
		RANK: "3",
		WORLD_SIZE: "8",
		LOCAL_RANK: "3",
		LOCAL_WORLD_SIZE: "4",
		MASTER_ADDR: "box",
		MASTER_PORT: "29500",
	};

	test("has torchrun's variables", () => {
		expect(placeFromEnvironment(torchrun)).toMatchObject({
			rank: 3,
			worldSize: 8,
			localRank: 3,
			address: "box",
			port: 29500,
		});
		expect(placeFromEnvironment({})).toBeNull();
	});

	test("whose host has all ranks meets them on its loopback interface, whatever the host is called", () => {
		expect(placeFromEnvironment({ ...torchrun, LOCAL_WORLD_SIZE: "8" })).toMatchObject({
			address: "127.0.0.1",
			secret: null,
		});
	});

	test("leaves torchrun's own store its port", () => {
		expect(placeFromEnvironment({ ...torchrun, TORCHELASTIC_USE_AGENT_STORE: "True" })!.port).toBe(29501);
	});

	for (const [change, sentence] of [
		[{ RANK: "8" }, "The environment has RANK=8; allowed is an integer from 0 to 7."],
		[{ WORLD_SIZE: "many" }, "The environment has WORLD_SIZE=many; allowed is an integer from 1."],
		[
			{ MASTER_ADDR: undefined },
			"The environment has RANK or WORLD_SIZE but no MASTER_ADDR; a rank needs all of torchrun's variables.",
		],
	] as const) {
		test(`with ${JSON.stringify(change)} is refused`, () => {
			expect(() => placeFromEnvironment({ ...torchrun, ...change })).toThrow(sentence);
		});
	}
});
