/**
 * Ranks that are let into a run, and the refusals of all others. Host and ranks talk over real sockets, in one process.
 */
import { afterEach, describe, expect, test } from "bun:test";
import { connect, createServer } from "node:net";
import { placementOf } from "../../src/launch/host-tree.ts";
import { hostsOf } from "../../src/launch/hosts.ts";
import { type Place, placeFromEnvironment } from "../../src/launch/place.ts";
import { joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import type { Identity } from "../../src/launch/rendezvous/identity.ts";
import type { Lead } from "../../src/launch/rendezvous/messages.ts";
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

/** A host that is rank 0 of three. */
async function host(): Promise<RendezvousServer> {
	const opened = await RendezvousServer.open(address, 0, secret, identity(0));
	open.push(opened);
	return opened;
}

function join(port: number, of: Identity, change: Partial<Place> = {}, milliseconds = 5000): Promise<string> {
	const place = { rank: of.rank!, worldSize: 3, localRank: 0, localSize: 3, address, port, secret, launcher: null };
	return joinRendezvous({ ...place, ...change }, of, milliseconds, () => {
		throw new Error("Nobody asks for this.");
	});
}

/** The request to the first rank of a host. */
function askFor(host: number, hostOfRank: readonly number[]): Lead {
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

test("ranks that fit are told where the run is", async () => {
	const here = await host();
	const ranks = [join(here.port, identity(1)), join(here.port, identity(2))];
	await here.gather([1, 2], 5000);
	here.welcome("/proc/1/fd/7");
	expect(await Promise.all(ranks)).toEqual(["/proc/1/fd/7", "/proc/1/fd/7"]);
});

test("the first rank of another machine is asked for its part of the run", async () => {
	const [here, there] = [identity(0, { library: "cuda" }), { library: "cuda", machine: "box 2" }];
	const opened = await RendezvousServer.open(address, 0, secret, here);
	open.push(opened);
	const place = { worldSize: 3, localRank: 0, localSize: 1, address, port: opened.port, secret, launcher: null };
	const asked: unknown[] = [];
	const ranks = [1, 2].map((rank) =>
		joinRendezvous({ ...place, rank }, identity(rank, there), 5000, (wanted, from) => {
			asked.push([rank, wanted, from]);
			return { run: "/proc/101/fd/9", port: 4712 };
		}),
	);
	await opened.gather([1, 2], 5000);
	const hostOfRank = hostsOf([here, opened.members.get(1)!, opened.members.get(2)!]);
	expect(hostOfRank).toEqual([0, 1, 1]);
	const lead = askFor(1, hostOfRank);
	const part = await opened.ask(1, lead);
	expect(part).toEqual({ run: "/proc/101/fd/9", port: 4712, address });
	opened.welcome((rank) => (rank === 0 ? "/proc/1/fd/7" : part.run));
	expect(await Promise.all(ranks)).toEqual(["/proc/101/fd/9", "/proc/101/fd/9"]);
	expect(asked).toEqual([[1, lead, { host: address, own: address }]]);
});

test("a machine that cannot take its part ends the run for all, in one sentence", async () => {
	const opened = await RendezvousServer.open(address, 0, secret, identity(0, { library: "cuda" }));
	open.push(opened);
	const place = { worldSize: 3, localRank: 0, localSize: 1, address, port: opened.port, secret, launcher: null };
	const rank = joinRendezvous({ ...place, rank: 1 }, identity(1, { library: "cuda", machine: "box 2" }), 5000, () => {
		throw new Error("/dev/shm is full.");
	});
	await opened.gather([1], 5000);
	const lead = askFor(1, [0, 1, 1]);
	const reasons = await Promise.all([refusal(opened.ask(1, lead)), refusal(rank)]);
	expect(reasons).toEqual([
		"rank 1 (host box, process 101) could not make its host's part of the run: /dev/shm is full.",
		"/dev/shm is full.",
	]);
});

test("the host may come later than the ranks", async () => {
	const first = await host();
	const { port } = first;
	first[Symbol.dispose]();
	const rank = join(port, identity(1));
	await Bun.sleep(250);
	const later = await RendezvousServer.open(address, port, secret, identity(0));
	open.push(later);
	await later.gather([1], 5000);
	later.welcome("here");
	expect(await rank).toBe("here");
});

describe("a rank that does not fit ends the run for all, in one sentence", () => {
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
			"rank 2 (host box, process 102) was told of 4 ranks, rank 0 (host box, process 100) of 3.",
		],
		[
			"another host, on the CPU library",
			identity(2, { host: "far", machine: "far 1" }),
			"rank 2 (host far, process 102) and rank 0 (host box, process 100) are on different hosts: ranks of several hosts need NCCL (--device cuda), the CPU library joins ranks of one host.",
		],
		[
			"a rank that is there already",
			identity(1, { pid: 999 }),
			"rank 1 (host box, process 999) and rank 1 (host box, process 101) are the same rank.",
		],
	];
	for (const [what, wrong, sentence] of cases) {
		test(what, async () => {
			const here = await host();
			const gathering = refusal(here.gather([1, 2], 5000));
			const good = refusal(join(here.port, identity(1)));
			await Bun.sleep(50);
			expect(await refusal(join(here.port, wrong))).toBe(sentence);
			expect(await gathering).toBe(sentence);
			expect(await good).toBe(sentence);
		});
	}
});

test("a wrong secret is refused and harms nobody", async () => {
	const here = await host();
	const good = [join(here.port, identity(1)), join(here.port, identity(2))];
	expect(await refusal(join(here.port, identity(1), { secret: "another" }))).toBe(
		"This process has not the secret of the run (MIMO_SECRET) that meets here.",
	);
	await here.gather([1, 2], 5000);
	here.welcome("run");
	expect(await Promise.all(good)).toEqual(["run", "run"]);
});

test("a host that has not the secret learns nothing and is not believed", async () => {
	// A host of another run accepts no rank that it cannot verify; a program that answers without proof is not taken for
	// a host.
	const server = createServer((socket) => {
		socket.write(`${JSON.stringify({ program: "mimo", protocol: 3, challenge: "0".repeat(64) })}\n`);
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
		`The rendezvous at ${address}:${port} has not the secret of this run (MIMO_SECRET).`,
	);
});

test("strangers, garbage and endless lines are turned away", async () => {
	const here = await host();
	for (const text of ["GET / HTTP/1.1\r\n\r\n", "{}\n", "x".repeat(3 << 20)]) {
		const socket = connect({ host: address, port: here.port });
		socket.on("error", () => {});
		socket.resume();
		const closed = new Promise((resolve) => socket.once("close", resolve));
		socket.write(text);
		await closed;
	}
	const ranks = [join(here.port, identity(1)), join(here.port, identity(2))];
	await here.gather([1, 2], 5000);
	here.welcome("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
});

test("absent ranks are named, and those that came are told", async () => {
	const here = await host();
	const rank = refusal(join(here.port, identity(1)));
	const sentence = "Rank 2 did not join within 0 s.";
	expect(await refusal(here.gather([1, 2], 300))).toBe(sentence);
	expect(await rank).toBe(sentence);
});

test("a rank that leaves before all are there ends it", async () => {
	const here = await host();
	const gathering = refusal(here.gather([1, 2], 5000));
	const child = Bun.spawn([process.execPath, "-e", leavingRank(here.port)], { stdout: "inherit", stderr: "inherit" });
	expect(await gathering).toMatch(/^rank 1 \(host box, process 101\) left before all had joined\.$/);
	child.kill();
});

/** A program that joins as rank 1 and is gone before an answer. */
function leavingRank(port: number): string {
	const place = { rank: 1, worldSize: 3, localRank: 1, localSize: 3, address, port, secret, launcher: null };
	const module = JSON.stringify(`${import.meta.dir}/../../src/launch/rendezvous/client.ts`);
	return `const { joinRendezvous } = await import(${module});
		void joinRendezvous(${JSON.stringify(place)}, ${JSON.stringify(identity(1))}, 5000, () => "");
		await Bun.sleep(500);
		process.exit(0);`;
}

describe("where there is no rendezvous", () => {
	test("a port in use is named", async () => {
		const here = await host();
		expect(await refusal(RendezvousServer.open(address, here.port, secret, identity(0)))).toBe(
			`Port ${here.port} of ${address}, where the ranks should meet, is in use by another program; give another MASTER_PORT.`,
		);
	});

	test("an address of another host is named", async () => {
		expect(await refusal(RendezvousServer.open("203.0.113.7", 29500, secret, identity(0)))).toBe(
			"MASTER_ADDR 203.0.113.7 is no address of this host, where rank 0 runs.",
		);
	});

	test("another program is recognised", async () => {
		const server = createServer((socket) => {
			socket.on("error", () => {});
			socket.end("HTTP/1.1 400 Bad Request\r\n\r\n");
		});
		await new Promise<void>((resolve) => server.listen(0, address, resolve));
		open.push({ [Symbol.dispose]: () => server.close() });
		const { port } = server.address() as { port: number };
		expect(await refusal(join(port, identity(1)))).toBe(
			`The program that listens at ${address}:${port} is no rendezvous of mimo; give another MASTER_PORT.`,
		);
	});

	test("nobody answers", async () => {
		const here = await host();
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
