/** The first rank of a machine registers the other local ranks at the rendezvous. Over real sockets, in one process. */
import { afterEach, expect, test } from "bun:test";
import { joinThroughFirstLocalRank, LocalRanks, localSocketName } from "../../src/launch/join.ts";
import type { Place } from "../../src/launch/place.ts";
import { AuthenticatedConnection } from "../../src/launch/rendezvous/authenticated-connection.ts";
import { joinLocalRendezvous, joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import type { Identity } from "../../src/launch/rendezvous/messages.ts";
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

function refuseRequest(): never {
	throw new Error("No shared memory was to be requested.");
}

/** Joins a rank of the second machine, or a rank on rank 0's machine. */
async function join(rank: number, change: Partial<Identity> = {}): Promise<string | null> {
	const own = identity(rank, change);
	const socketName = localSocketName(place(rank), own)!;
	if (rank !== 3) return await joinThroughFirstLocalRank(socketName, place(rank), own, 5000);
	using localRanks = await LocalRanks.open(socketName, place(rank), own);
	return await joinRendezvous(place(rank), own, 5000, refuseRequest, localRanks);
}

function sentence(promise: Promise<unknown>): Promise<string> {
	return promise.then(
		(value) => `not refused: ${value}`,
		(error: Error) => error.message,
	);
}

const others = [1, 2, 3, 4, 5];

test("rank 0 learns of all ranks over one connection for each other machine", async () => {
	const here = await rendezvous();
	await here.listenLocally(localSocketName(place(0), identity(0))!, 3);
	const { accept: welcome } = AuthenticatedConnection;
	const accepted: string[] = [];
	AuthenticatedConnection.accept = async (connection, of) => {
		accepted.push(connection.from);
		return await welcome.call(AuthenticatedConnection, connection, of);
	};
	open.push({ [Symbol.dispose]: () => void Object.assign(AuthenticatedConnection, { welcome }) });
	const ranks = others.map((rank) => join(rank));
	await here.waitForRanks(others, 5000);
	expect([...here.members.keys()].sort()).toEqual(others);
	expect(here.members.get(5)).toEqual(identity(5));
	here.announceRun((rank) => `run of rank ${rank}`);
	const [one, two, ...second] = await Promise.all(ranks);
	expect([one, two]).toEqual(["run of rank 1", "run of rank 2"]);
	expect(second).toEqual(["run of rank 3", "run of rank 3", "run of rank 3"]);
	expect(accepted.sort()).toEqual([address, ...Array.from({ length: 4 }, () => "this host")]);
});

test("an incompatible local rank ends the run for all, in one sentence", async () => {
	const here = await rendezvous();
	const gathering = sentence(here.waitForRanks(others, 5000));
	const good = [3, 4].map((rank) => sentence(join(rank)));
	await Bun.sleep(200);
	const wrong =
		"rank 5 (host box, process 105) has another configuration than rank 3 (host box, process 103): seed 2 instead of 1.";
	expect(await sentence(join(5, { configuration: { seed: "2" } }))).toBe(wrong);
	expect(await Promise.all([gathering, ...good])).toEqual([wrong, wrong, wrong]);
});

test("a local rank that disconnects before all have joined is named", async () => {
	const here = await rendezvous();
	const gathering = sentence(here.waitForRanks(others, 5000));
	const first = sentence(join(3));
	const left = await joinLocalRendezvous(localSocketName(place(4), identity(4))!, secret, identity(4), 300, 5000).catch(
		() => "left",
	);
	expect(left).toBe("left");
	const why = "rank 4 (host box, process 104) disconnected before all ranks had joined.";
	expect(await Promise.all([gathering, first])).toEqual([why, why]);
	expect(here.disconnected).toBe(4);
});

test("absent local ranks are named", async () => {
	const here = await rendezvous();
	const gathering = sentence(here.waitForRanks(others, 1000));
	const joined = [3, 5].map((rank) => sentence(join(rank)));
	const why = "Ranks 1, 2, 4 did not join within 1 s.";
	expect(await Promise.all([gathering, ...joined])).toEqual([why, why, why]);
});

test("a rank that does not find the first rank of its machine may join at rank 0 directly", async () => {
	const here = await rendezvous();
	expect(await joinLocalRendezvous(localSocketName(place(4), identity(4))!, secret, identity(4), 5000, 300)).toBeNull();
	const alone = joinRendezvous(place(4), identity(4), 5000, refuseRequest);
	const ranks = [1, 2, 3, 5].map((rank) => joinRendezvous(place(rank), identity(rank), 5000, refuseRequest));
	await here.waitForRanks(others, 5000);
	here.announceRun("run");
	expect(await Promise.all([alone, ...ranks])).toEqual(["run", "run", "run", "run", "run"]);
});

test("the name of the local socket depends on the secret, the run and the machine", () => {
	const own = identity(4);
	const names = [
		localSocketName(place(4), own),
		localSocketName({ ...place(4), secret: "another" }, own),
		localSocketName({ ...place(4), port: port + 1 }, own),
		localSocketName(place(4), { ...own, machine: "another" }),
	];
	expect(new Set(names).size).toBe(names.length);
	expect(localSocketName({ ...place(4), secret: null }, own)).toBeNull();
	expect(localSocketName({ ...place(4), localSize: 6 }, own)).toBeNull();
});

test("nodes of a job on one machine have different local sockets", () => {
	const names = ["0", "1"].map((node) => localSocketName({ ...place(3), node }, identity(3)));
	expect(new Set(names).size).toBe(2);
	expect(localSocketName({ ...place(4), node: "1" }, identity(4))).toBe(names[1]!);
});
