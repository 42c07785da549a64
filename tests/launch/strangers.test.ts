/**
 * Strangers at the port where ranks meet, and ranks that know the secret and lie. Over real sockets, in one process.
 */
import { afterEach, describe, expect, test } from "bun:test";
import { connect, createServer, type Server, type Socket } from "node:net";
import { joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import { digestOf, type Identity, introductionOf } from "../../src/launch/rendezvous/identity.ts";
import { LineConnection, listen } from "../../src/launch/rendezvous/line-connection.ts";
import { ProvenConnection } from "../../src/launch/rendezvous/proven-connection.ts";
import { RendezvousServer } from "../../src/launch/rendezvous/server.ts";

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

async function host(): Promise<RendezvousServer> {
	const opened = await RendezvousServer.open(address, 0, secret, identity(0));
	open.push(opened);
	return opened;
}

function join(port: number, rank: number, milliseconds = 5000): Promise<string> {
	const place = { rank, worldSize: 3, localRank: rank, localSize: 3, address, port, secret, launcher: null };
	return joinRendezvous(place, identity(rank), milliseconds, () => {
		throw new Error("Nobody asks for this.");
	});
}

/** A stranger's connection, whose end is noted. */
function knock(port: number): { readonly socket: Socket; readonly closed: Promise<void>; ended: boolean } {
	const socket = connect({ host: address, port });
	socket.on("error", () => {});
	socket.resume();
	const knocking = {
		socket,
		ended: false,
		closed: new Promise<void>((resolve) => socket.once("close", () => resolve())),
	};
	void knocking.closed.then(() => {
		knocking.ended = true;
	});
	open.push({ [Symbol.dispose]: () => socket.destroy() });
	return knocking;
}

/** Joins a connection to one of its own to `port`. */
function passOn(socket: Socket, port: number): void {
	const onward = connect({ host: address, port });
	onward.on("error", () => {});
	socket.pipe(onward);
	onward.pipe(socket);
}

/** The two ranks that are missing come, and the run begins. */
async function runBegins(here: RendezvousServer): Promise<void> {
	const ranks = [join(here.port, 1), join(here.port, 2)];
	await here.gather([1, 2], 5000);
	here.welcome("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
}

test("lines that nobody asked for are not kept", async () => {
	const taken: LineConnection[] = [];
	const { port, server } = await listen({ host: address, port: 0 }, (connection) => taken.push(connection));
	open.push({ [Symbol.dispose]: () => server.close() });
	for (const text of ["\n".repeat(1000), "x".repeat(600), `${"x".repeat(600)}\n`]) {
		const stranger = knock(port);
		stranger.socket.write(text);
		await Promise.race([stranger.closed, Bun.sleep(2000)]);
		expect([text.slice(0, 2), stranger.ended]).toEqual([text.slice(0, 2), true]);
	}
	for (const connection of taken) expect(await connection.receive(0)).toBeUndefined();
});

test("silent connections are bounded in number, and ranks come in all the same", async () => {
	const here = await host();
	const silent = Array.from({ length: 400 }, () => knock(here.port));
	await Bun.sleep(500);
	// 64, and as many as the run has ranks.
	expect(silent.filter(({ ended }) => !ended).length).toBeLessThanOrEqual(67);
	await runBegins(here);
	await Promise.all(silent.map(({ closed }) => closed));
	const late = knock(here.port);
	await late.closed;
}, 20_000);

test("a connection that dribbles is ended while it still sends", async () => {
	const here = await host();
	const slow = knock(here.port);
	const began = performance.now();
	const dribble = setInterval(() => slow.socket.write("x"), 100);
	await Promise.race([slow.closed, Bun.sleep(14_000)]);
	clearInterval(dribble);
	expect(slow.ended).toBe(true);
	expect(performance.now() - began).toBeGreaterThan(8000);
	await runBegins(here);
}, 20_000);

test("a proof that was seen on another connection is refused", async () => {
	const here = await host();
	const said: string[] = [];
	// Passes on between a rank and the host, and listens.
	const relay = createServer((socket) => {
		const onward = connect({ host: address, port: here.port });
		socket.on("data", (bytes) => {
			said.push(bytes.toString());
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
	while (said.length < 2) await Bun.sleep(5);
	const replayed = knock(here.port);
	let heard = "";
	replayed.socket.on("data", (bytes) => {
		heard += bytes;
	});
	replayed.socket.write(said.join(""));
	await replayed.closed;
	expect(heard).toContain('{"refused":"secret"}');
	const other = join(here.port, 2);
	await here.gather([1, 2], 5000);
	here.welcome("run");
	expect(await Promise.all([rank, other])).toEqual(["run", "run"]);
});

async function listening(server: Server): Promise<number> {
	await new Promise<void>((resolve) => server.listen(0, address, resolve));
	open.push({ [Symbol.dispose]: () => server.close() });
	return (server.address() as { port: number }).port;
}

test("a process of the run that says what no rank says is refused, and harms nobody", async () => {
	const here = await host();
	for (const body of [{}, { rank: 1 }, "?", null, { ...identity(1), colour: "blue" }]) {
		const lines = await LineConnection.open({ host: address, port: here.port }, 1000);
		const guest = (await ProvenConnection.introduce(lines, secret)) as ProvenConnection;
		guest.send(body);
		expect(await guest.receive(2000)).toEqual({
			refused: "The rendezvous does not understand what this rank says it is: it is of another version.",
		});
		lines.drop();
	}
	await runBegins(here);
});

test("a rank sends its configuration only when asked, and one that then does not tell it ends the run by name", async () => {
	const here = await host();
	const gathered = here.gather([1, 2], 5000).then(String, (error: Error) => error.message);
	const guests = await Promise.all(
		[1, 2].map(async (rank) => {
			const lines = await LineConnection.open({ host: address, port: here.port }, 1000);
			const guest = (await ProvenConnection.introduce(lines, secret)) as ProvenConnection;
			const configuration: Record<string, string> = rank === 1 ? {} : { seed: "2" };
			guest.send(introductionOf({ ...identity(rank), configuration }));
			return { guest, lines };
		}),
	);
	expect(await guests[1]!.guest.receive(2000)).toEqual({ tell: "configuration" });
	guests[1]!.lines.drop();
	const sentence =
		"rank 2 (host box, process 102) has another configuration than rank 0 (host box, process 100), and does not tell it.";
	// The first rank's digest is the host's: the first word to it is the refusal.
	expect(await guests[0]!.guest.receive(2000)).toEqual({ refused: sentence });
	expect(await gathered).toBe(sentence);
	guests[0]!.lines.drop();
});

test("the order of a configuration's keys does not matter to its digest, and every key and value does", () => {
	const same = [digestOf({ a: "1", b: "2" }), digestOf({ b: "2", a: "1" })];
	expect(new Set(same).size).toBe(1);
	const others = [{ a: "1" }, { a: "2", b: "1" }, { a: "1", b: "2", c: "" }, { 'a","1': "2" }, {}].map(digestOf);
	expect(new Set([...same, ...others]).size).toBe(6);
});

test("a rank that is crowded out tries again, and is told so when its time is over", async () => {
	const here = await host();
	let refused = 0;
	const crowd = createServer((socket) => {
		socket.on("error", () => {});
		if (refused++ < 5) {
			socket.destroy();
			return;
		}
		passOn(socket, here.port);
	});
	const ranks = [join(await listening(crowd), 1), join(here.port, 2)];
	await here.gather([1, 2], 5000);
	here.welcome("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
	expect(refused).toBe(6);
	const full = await listening(createServer((socket) => socket.on("error", () => {}).destroy()));
	await expect(join(full, 1, 600)).rejects.toThrow(
		/^The rendezvous at \S+ has not taken this rank in, in \d+ attempts: others connect there all the time and keep it busy\.$/,
	);
});

test("a connection that the host's kernel has forgotten costs a rank a second, not ten", async () => {
	const here = await host();
	let came = 0;
	// It looks open to the rank, and nothing ever comes.
	const forgetful = createServer((socket) => {
		socket.on("error", () => {});
		if (came++ === 0) {
			open.push({ [Symbol.dispose]: () => socket.destroy() });
			return;
		}
		passOn(socket, here.port);
	});
	const ranks = [join(await listening(forgetful), 1), join(here.port, 2)];
	await here.gather([1, 2], 5000);
	here.welcome("run");
	expect(await Promise.all(ranks)).toEqual(["run", "run"]);
	expect(came).toBe(2);
}, 10_000);

describe("after the proof", () => {
	/** Both ends of a connection, and the guest's bytes on the wire. */
	async function pair() {
		const welcomed = Promise.withResolvers<ProvenConnection>();
		const { port, server } = await listen({ host: address, port: 0 }, (connection) => {
			void ProvenConnection.welcome(connection, secret).then((one) => welcomed.resolve(one as ProvenConnection));
		});
		open.push({ [Symbol.dispose]: () => server.close() });
		const lines = await LineConnection.open({ host: address, port: port }, 1000);
		const guest = (await ProvenConnection.introduce(lines, secret)) as ProvenConnection;
		const wire: string[] = [];
		const send = lines.send.bind(lines);
		lines.send = (line) => void wire.push(line);
		open.push(guest);
		return { guest, host: await welcomed.promise, wire, put: send };
	}

	test("messages arrive in order, both ways", async () => {
		const { guest, host: here, wire, put } = await pair();
		for (const value of [1, { two: [2] }, "3"]) guest.send(value);
		for (const line of wire) put(line);
		for (const value of [1, { two: [2] }, "3"]) expect(await here.receive(1000)).toEqual(value);
		here.send("yes");
		expect(await guest.receive(1000)).toBe("yes");
	});

	const lies: readonly [string, (lines: readonly string[]) => readonly string[], number][] = [
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
	for (const [name, change, genuine] of lies) {
		test(`a message that is ${name} ends the connection`, async () => {
			const { guest, host: here, wire, put } = await pair();
			guest.send("first");
			guest.send("second");
			for (const line of change(wire)) put(line);
			for (let i = 0; i < genuine; i++) expect(await here.receive(1000)).toBe("first");
			expect(await here.receive(1000)).toBeUndefined();
			expect(here.closed).toBe(true);
		});
	}

	test("a message that is sent back ends the connection", async () => {
		const { guest, host: here, put } = await pair();
		const back: string[] = [];
		const lines = (here as unknown as { connection: LineConnection }).connection;
		lines.send = (line) => void back.push(line);
		here.send("first");
		put(back[0]!);
		expect(await here.receive(1000)).toBeUndefined();
		expect([here.closed, guest.closed]).toEqual([true, expect.any(Boolean)]);
	});
});

describe("without a secret", () => {
	test("processes of this user come in", async () => {
		const here = await RendezvousServer.open(address, 0, null, identity(0));
		open.push(here);
		const place = { worldSize: 3, localRank: 1, localSize: 3, address, port: here.port, secret: null, launcher: null };
		const ranks = [1, 2].map((rank) =>
			joinRendezvous({ ...place, rank }, identity(rank), 5000, () => ({ run: "run", port: 0 })),
		);
		await here.gather([1, 2], 5000);
		here.welcome("run");
		expect(await Promise.all(ranks)).toEqual(["run", "run"]);
	});

	test("those of another user do not", async () => {
		if (process.geteuid!() !== 0 || !Bun.which("setpriv")) {
			console.error("skip: only root can become another user");
			return;
		}
		const here = await RendezvousServer.open(address, 0, null, identity(0));
		open.push(here);
		const script = `exec 3<>/dev/tcp/127.0.0.1/${here.port}; cat <&3`;
		const other = Bun.spawn(["setpriv", "--reuid=65534", "--clear-groups", "bash", "-c", script], { stdout: "pipe" });
		expect(await other.stdout.text()).toEndWith('{"refused":"owner"}\n');
		const gathered = here.gather([1, 2], 100);
		await expect(gathered).rejects.toThrow("A process at 127.0.0.1 belonged to another user and was refused.");
	});
});
