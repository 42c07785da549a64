/** The first rank of a machine speaks for its neighbours when ranks meet. Over real sockets, in one process. */
import { afterEach, expect, test } from "bun:test";
import type { Place } from "../../src/launch/place.ts";
import { joinLocalRendezvous, joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import type { Identity } from "../../src/launch/rendezvous/identity.ts";
import { joinThroughFirstLocalRank, LocalRanks, localSocketOf } from "../../src/launch/rendezvous/local-ranks.ts";
import { ProvenConnection } from "../../src/launch/rendezvous/proven-connection.ts";
import { RendezvousServer } from "../../src/launch/rendezvous/server.ts";

const address = "127.0.0.1";
const secret = "a secret";
const open: Disposable[] = [];
afterEach(() => {
	for (const resource of open.splice(0)) resource[Symbol.dispose]();
});

/** Ranks 0 to 2 are on the first machine, 3 to 5 on the second. */
function identity(rank: number, change: Partial<Identity> = {}): Identity {
	const machine = `${port} box ${rank < 3 ? 1 : 2}`;
	const program = { version: "0.1.0", abi: 2, library: "cuda", configuration: { seed: "1" } };
	return { rank, worldSize: 6, host: "box", machine, pid: 100 + rank, ...program, ...change };
}

let port = 0;
async function rendezvous(): Promise<RendezvousServer> {
	port = 0;
	const opened = await RendezvousServer.open(address, 0, secret, identity(0));
	open.push(opened);
	port = opened.port;
	return opened;
}

function place(rank: number): Place {
	return { rank, worldSize: 6, localRank: rank % 3, localSize: 3, address, port, secret, launcher: null };
}

function refuseToLead(): never {
	throw new Error("Nobody asks for this.");
}

/** A rank of the second machine, or a neighbour of rank 0. */
async function join(rank: number, change: Partial<Identity> = {}): Promise<string | null> {
	const own = identity(rank, change);
	const room = localSocketOf(place(rank), own)!;
	if (rank !== 3) return await joinThroughFirstLocalRank(room, place(rank), own, 5000);
	using neighbours = await LocalRanks.open(room, place(rank), own);
	return await joinRendezvous(place(rank), own, 5000, refuseToLead, neighbours);
}

function sentence(promise: Promise<unknown>): Promise<string> {
	return promise.then(
		(value) => `not refused: ${value}`,
		(error: Error) => error.message,
	);
}

const others = [1, 2, 3, 4, 5];

test("rank 0 is told of all by one connection for each other machine", async () => {
	const here = await rendezvous();
	await here.alsoAt(localSocketOf(place(0), identity(0))!, 3);
	const { welcome } = ProvenConnection;
	const welcomed: string[] = [];
	ProvenConnection.welcome = async (connection, of) => {
		welcomed.push(connection.from);
		return await welcome.call(ProvenConnection, connection, of);
	};
	open.push({ [Symbol.dispose]: () => void Object.assign(ProvenConnection, { welcome }) });
	const ranks = others.map((rank) => join(rank));
	await here.gather(others, 5000);
	expect([...here.members.keys()].sort()).toEqual(others);
	expect(here.members.get(5)).toEqual(identity(5));
	here.welcome((rank) => `run of rank ${rank}`);
	const [one, two, ...second] = await Promise.all(ranks);
	expect([one, two]).toEqual(["run of rank 1", "run of rank 2"]);
	expect(second).toEqual(["run of rank 3", "run of rank 3", "run of rank 3"]);
	expect(welcomed.sort()).toEqual([address, ...Array.from({ length: 4 }, () => "this host")]);
});

test("a neighbour that does not fit ends the run for all, in one sentence", async () => {
	const here = await rendezvous();
	const gathering = sentence(here.gather(others, 5000));
	const good = [3, 4].map((rank) => sentence(join(rank)));
	await Bun.sleep(200);
	const wrong =
		"rank 5 (host box, process 105) has another configuration than rank 3 (host box, process 103): seed 2 instead of 1.";
	expect(await sentence(join(5, { configuration: { seed: "2" } }))).toBe(wrong);
	expect(await Promise.all([gathering, ...good])).toEqual([wrong, wrong, wrong]);
});

test("a neighbour that leaves before all are there is named", async () => {
	const here = await rendezvous();
	const gathering = sentence(here.gather(others, 5000));
	const first = sentence(join(3));
	const left = await joinLocalRendezvous(localSocketOf(place(4), identity(4))!, secret, identity(4), 300, 5000).catch(
		() => "left",
	);
	expect(left).toBe("left");
	const why = "rank 4 (host box, process 104) left before all had joined.";
	expect(await Promise.all([gathering, first])).toEqual([why, why]);
	expect(here.left).toBe(4);
});

test("absent neighbours are named by their ranks", async () => {
	const here = await rendezvous();
	const gathering = sentence(here.gather(others, 1000));
	const came = [3, 5].map((rank) => sentence(join(rank)));
	const why = "Ranks 1, 2, 4 did not join within 1 s.";
	expect(await Promise.all([gathering, ...came])).toEqual([why, why, why]);
});

test("where the first rank of a machine is not found, a rank is told so and may meet rank 0 by itself", async () => {
	const here = await rendezvous();
	expect(await joinLocalRendezvous(localSocketOf(place(4), identity(4))!, secret, identity(4), 5000, 300)).toBeNull();
	const alone = joinRendezvous(place(4), identity(4), 5000, refuseToLead);
	const ranks = [1, 2, 3, 5].map((rank) => joinRendezvous(place(rank), identity(rank), 5000, refuseToLead));
	await here.gather(others, 5000);
	here.welcome("run");
	expect(await Promise.all([alone, ...ranks])).toEqual(["run", "run", "run", "run", "run"]);
});

test("the name at which neighbours meet depends on the secret, the run and the machine", () => {
	const own = identity(4);
	const rooms = [
		localSocketOf(place(4), own),
		localSocketOf({ ...place(4), secret: "another" }, own),
		localSocketOf({ ...place(4), port: port + 1 }, own),
		localSocketOf(place(4), { ...own, machine: "another" }),
	];
	expect(new Set(rooms).size).toBe(rooms.length);
	expect(localSocketOf({ ...place(4), secret: null }, own)).toBeNull();
	expect(localSocketOf({ ...place(4), localSize: 6 }, own)).toBeNull();
});

test("nodes of a job that are one machine have rooms of their own", () => {
	const rooms = ["0", "1"].map((node) => localSocketOf({ ...place(3), node }, identity(3)));
	expect(new Set(rooms).size).toBe(2);
	expect(localSocketOf({ ...place(4), node: "1" }, identity(4))).toBe(rooms[1]!);
});
