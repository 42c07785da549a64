/**
 * Connections of processes without the secret at the rendezvous, and wrong messages of processes with it. Over real sockets, in
 * one process.
 */
import { afterEach, describe, expect, test } from "bun:test";
import { connect, createServer, type Server, type Socket } from "node:net";
import { AuthenticatedConnection } from "../../src/launch/rendezvous/authenticated-connection.ts";
import { joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import { LineConnection, listen } from "../../src/launch/rendezvous/line-connection.ts";
import { digestOf, type Identity, introductionOf } from "../../src/launch/rendezvous/messages.ts";
import { RendezvousServer } from "../../src/launch/rendezvous/server.ts";
import { absent, hasPrograms } from "../absent.ts";

const address = "127.0.0.1";
const secret = "a secret";
const open: Disposable[] = [];
afterEach(() => {
	for (const resource of open.splice(0)) resource[Symbol.dispose]();
});

function identity(rank: number): Identity {
	const program = { version: "0.1.0", abi: 2, library: "cpu", configuration: {} };
	return { rank, worldSize: 3, host: "box", machine: "box 1", pid: 100 + rank, ...program };
}

async function serve(): Promise<RendezvousServer> {
	const opened = await RendezvousServer.open(address, 0, secret, identity(0));
	open.push(opened);
	return opened;
}

function join(port: number, rank: number, milliseconds = 5000): Promise<string> {
	const place = { rank, worldSize: 3, localRank: rank, localSize: 3, address, port, secret, launcher: null };
	return joinRendezvous(place, identity(rank), milliseconds, () => {
		throw new Error("No shared memory was to be requested.");
	});
}

/** An unauthenticated connection; `ended` says whether it is closed. */
function connectUnauthenticated(port: number): {
	readonly socket: Socket;
	readonly closed: Promise<void>;
	ended: boolean;
} {
	const socket = connect({ host: address, port });
	socket.on("error", () => {});
	socket.resume();
	const connection = {
		socket,
		ended: false,
		closed: new Promise<void>((resolve) => socket.once("close", () => resolve())),
	};
	void connection.closed.then(() => {
		connection.ended = true;
	});
	open.push({ [Symbol.dispose]: () => socket.destroy() });
	return connection;
}

/** Forwards between a connection and `port`. */
function forward(socket: Socket, port: number): void {
	const onward = connect({ host: address, port });
	onward.on("error", () => {});
	socket.pipe(onward);
	onward.pipe(socket);
}

/** Ranks 1 and 2 join, and the run starts. */
async function expectStart(here: RendezvousServer): Promise<void> {
	const ranks = [join(here.port, 1), join(here.port, 2)];
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
}

test("a connection that sends more than one proof's length is dropped, and its lines are discarded", async () => {
	const taken: LineConnection[] = [];
	const { port, server } = await listen({ host: address, port: 0 }, (connection) => taken.push(connection));
	open.push({ [Symbol.dispose]: () => server.close() });
	for (const text of ["\n".repeat(1000), "x".repeat(600), `${"x".repeat(600)}\n`]) {
		const other = connectUnauthenticated(port);
		other.socket.write(text);
		await Promise.race([other.closed, Bun.sleep(2000)]);
		expect([text.slice(0, 2), other.ended]).toEqual([text.slice(0, 2), true]);
	}
	for (const connection of taken) expect(await connection.receive(0)).toBeUndefined();
});

test("the number of silent connections is bounded, and ranks still join", async () => {
	const here = await serve();
	const silent = Array.from({ length: 400 }, () => connectUnauthenticated(here.port));
	// 64, and as many as the run has ranks.
	const end = performance.now() + 5000;
	while (silent.filter(({ ended }) => !ended).length > 67 && performance.now() < end) await Bun.sleep(20);
	expect(silent.filter(({ ended }) => !ended).length).toBeLessThanOrEqual(67);
	await expectStart(here);
	await Promise.all(silent.map(({ closed }) => closed));
	const late = connectUnauthenticated(here.port);
	await late.closed;
}, 20_000);

test("a connection that sends a byte at a time is dropped after the time to authenticate", async () => {
	const here = await serve();
	const slow = connectUnauthenticated(here.port);
	const began = performance.now();
	const dribble = setInterval(() => slow.socket.write("x"), 100);
	await Promise.race([slow.closed, Bun.sleep(14_000)]);
	clearInterval(dribble);
	expect(slow.ended).toBe(true);
	expect(performance.now() - began).toBeGreaterThan(8000);
	await expectStart(here);
}, 20_000);

test("a proof replayed from another connection is refused", async () => {
	const here = await serve();
	const sent: string[] = [];
	// Forwards between a rank and the server, and keeps what the rank sends.
	const relay = createServer((socket) => {
		const onward = connect({ host: address, port: here.port });
		socket.on("data", (bytes) => {
			sent.push(bytes.toString());
			onward.write(bytes);
		});
		onward.on("data", (bytes) => void socket.write(bytes));
		for (const [one, other] of [
			[socket, onward],
			[onward, socket],
		] as const) {
			one.on("error", () => {});
			one.on("close", () => other.destroy());
		}
	});
	const port = await listening(relay);
	const rank = join(port, 1);
	while (sent.length < 2) await Bun.sleep(5);
	const replayed = connectUnauthenticated(here.port);
	let received = "";
	replayed.socket.on("data", (bytes) => {
		received += bytes;
	});
	replayed.socket.write(sent.join(""));
	await replayed.closed;
	expect(received).toContain('{"refused":"secret"}');
	const other = join(here.port, 2);
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("run");
	expect(await Promise.all([rank, other])).toEqual(["run", "run"]);
});

async function listening(server: Server): Promise<number> {
	await new Promise<void>((resolve) => server.listen(0, address, resolve));
	open.push({ [Symbol.dispose]: () => server.close() });
	return (server.address() as { port: number }).port;
}

test("an authenticated process that sends a malformed introduction is refused, and the run starts without it", async () => {
	const here = await serve();
	for (const body of [{}, { rank: 1 }, "?", null, { ...identity(1), colour: "blue" }]) {
		const lines = await LineConnection.open({ host: address, port: here.port }, 1000);
		const client = (await AuthenticatedConnection.connect(lines, secret)) as AuthenticatedConnection;
		client.send(body);
		expect(await client.receive(2000)).toEqual({
			refused: "The rendezvous cannot read the introduction of this rank, which is of another version.",
		});
		lines.drop();
	}
	await expectStart(here);
});

test("a configuration is requested only where digests differ, and a rank that does not send it is named in the failure", async () => {
	const here = await serve();
	const gathered = here.waitForRanks([1, 2], 5000).then(String, (error: Error) => error.message);
	const clients = await Promise.all(
		[1, 2].map(async (rank) => {
			const lines = await LineConnection.open({ host: address, port: here.port }, 1000);
			const client = (await AuthenticatedConnection.connect(lines, secret)) as AuthenticatedConnection;
			const configuration: Record<string, string> = rank === 1 ? {} : { seed: "2" };
			client.send(introductionOf({ ...identity(rank), configuration }));
			return { client, lines };
		}),
	);
	expect(await clients[1]!.client.receive(2000)).toEqual({ request: "configuration" });
	clients[1]!.lines.drop();
	const sentence =
		"rank 2 (host box, process 102) has another configuration than rank 0 (host box, process 100), and did not send it.";
	// The first rank's digest is the server's, so the first message to it is the refusal.
	expect(await clients[0]!.client.receive(2000)).toEqual({ refused: sentence });
	expect(await gathered).toBe(sentence);
	clients[0]!.lines.drop();
});

test("a configuration's digest depends on every key and value, not on the order of keys", () => {
	const same = [digestOf({ a: "1", b: "2" }), digestOf({ b: "2", a: "1" })];
	expect(new Set(same).size).toBe(1);
	const others = [{ a: "1" }, { a: "2", b: "1" }, { a: "1", b: "2", c: "" }, { 'a","1': "2" }, {}].map(digestOf);
	expect(new Set([...same, ...others]).size).toBe(6);
});

test("a rank whose connection is dropped tries again, until its time is over", async () => {
	const here = await serve();
	let refused = 0;
	const crowded = createServer((socket) => {
		socket.on("error", () => {});
		if (refused++ < 5) {
			socket.destroy();
			return;
		}
		forward(socket, here.port);
	});
	const ranks = [join(await listening(crowded), 1), join(here.port, 2)];
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
	expect(refused).toBe(6);
	const full = await listening(createServer((socket) => socket.on("error", () => {}).destroy()));
	await expect(join(full, 1, 600)).rejects.toThrow(
		/^The rendezvous at \S+ did not accept this rank in \d+ attempts: connections of other processes keep it busy\.$/,
	);
});

test("a connection without a greeting is retried after a second, not ten", async () => {
	const here = await serve();
	let came = 0;
	// The first connection looks open to the rank, and stays silent.
	const silent = createServer((socket) => {
		socket.on("error", () => {});
		if (came++ === 0) {
			open.push({ [Symbol.dispose]: () => socket.destroy() });
			return;
		}
		forward(socket, here.port);
	});
	const ranks = [join(await listening(silent), 1), join(here.port, 2)];
	await here.waitForRanks([1, 2], 5000);
	here.announceRun("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
	expect(came).toBe(2);
}, 10_000);

describe("an authenticated connection", () => {
	/** Both ends of a connection; `wire` keeps the client's lines, which `put` sends. */
	async function pair() {
		const accepted = Promise.withResolvers<AuthenticatedConnection>();
		const { port, server } = await listen({ host: address, port: 0 }, (connection) => {
			void AuthenticatedConnection.accept(connection, secret).then((one) =>
				accepted.resolve(one as AuthenticatedConnection),
			);
		});
		open.push({ [Symbol.dispose]: () => server.close() });
		const lines = await LineConnection.open({ host: address, port: port }, 1000);
		const client = (await AuthenticatedConnection.connect(lines, secret)) as AuthenticatedConnection;
		const wire: string[] = [];
		const send = lines.send.bind(lines);
		lines.send = (line) => void wire.push(line);
		open.push(client);
		return { client, server: await accepted.promise, wire, put: send };
	}

	test("delivers messages in order, both ways", async () => {
		const { client, server: here, wire, put } = await pair();
		for (const value of [1, { two: [2] }, "3"]) client.send(value);
		for (const line of wire) put(line);
		for (const value of [1, { two: [2] }, "3"]) expect(await here.receive(1000)).toEqual(value);
		here.send("yes");
		expect(await client.receive(1000)).toBe("yes");
	});

	const tampered: readonly [string, (lines: readonly string[]) => readonly string[], number][] = [
		["altered", ([one]) => [one!.replace("first", "other")], 0],
		[
			"with the tag of another",
			([one, two]) => [JSON.stringify({ ...JSON.parse(one!), tag: JSON.parse(two!).tag })],
			0,
		],
		["without a tag", () => ['{"body":"1"}'], 0],
		["repeated", ([one]) => [one!, one!], 1],
		["out of order", ([one, two]) => [two!, one!], 0],
		["illegible", () => ["?"], 0],
	];
	for (const [name, change, genuine] of tampered) {
		test(`ends at a message that is ${name}`, async () => {
			const { client, server: here, wire, put } = await pair();
			client.send("first");
			client.send("second");
			for (const line of change(wire)) put(line);
			for (let i = 0; i < genuine; i++) expect(await here.receive(1000)).toBe("first");
			expect(await here.receive(1000)).toBeUndefined();
			expect(here.closed).toBe(true);
		});
	}

	test("ends at a message that is sent back", async () => {
		const { client, server: here, put } = await pair();
		const back: string[] = [];
		const lines = (here as unknown as { connection: LineConnection }).connection;
		lines.send = (line) => void back.push(line);
		here.send("first");
		put(back[0]!);
		expect(await here.receive(1000)).toBeUndefined();
		expect([here.closed, client.closed]).toEqual([true, expect.any(Boolean)]);
	});
});

describe("without a secret", () => {
	test("processes of this user are accepted", async () => {
		const here = await RendezvousServer.open(address, 0, null, identity(0));
		open.push(here);
		const place = { worldSize: 3, localRank: 1, localSize: 3, address, port: here.port, secret: null, launcher: null };
		const ranks = [1, 2].map((rank) =>
			joinRendezvous({ ...place, rank }, identity(rank), 5000, () => ({ run: "run", port: 0 })),
		);
		await here.waitForRanks([1, 2], 5000);
		here.announceRun("run");
		expect(await Promise.all(ranks)).toEqual(["run", "run"]);
	});

	test("connections that are closed at once are dropped before the kernel's tables are searched for their owners", async () => {
		const here = await RendezvousServer.open(address, 0, null, identity(0));
		open.push(here);
		const ended = Array.from({ length: 20 }, async () => {
			const { socket, closed } = connectUnauthenticated(here.port);
			socket.once("connect", () => socket.resetAndDestroy());
			await closed;
		});
		await Promise.all(ended);
		await expect(here.waitForRanks([1, 2], 300)).rejects.toThrow(
			/^Ranks 1, 2 did not join within 0 s\. A process at .* did not speak the rendezvous protocol and was refused\.$/,
		);
	});

	const canBeAnother =
		hasPrograms(["setpriv"], "util-linux") && (process.geteuid!() === 0 || absent("root", "sudo") !== null);
	test.skipIf(!canBeAnother)("processes of another user are refused", async () => {
		const here = await RendezvousServer.open(address, 0, null, identity(0));
		open.push(here);
		const script = `exec 3<>/dev/tcp/127.0.0.1/${here.port}; cat <&3`;
		const other = Bun.spawn(["setpriv", "--reuid=65534", "--clear-groups", "bash", "-c", script], { stdout: "pipe" });
		expect(await other.stdout.text()).toEndWith('{"refused":"owner"}\n');
		const gathered = here.waitForRanks([1, 2], 100);
		await expect(gathered).rejects.toThrow("A process at 127.0.0.1 belonged to another user and was refused.");
	});
});
