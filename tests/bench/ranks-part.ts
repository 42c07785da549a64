/**
 * Plays hosts of a large run: every rank meets the others, and every host's first rank relays, beats and watches, as in a run
 * that trains; the others of a host join and finish at once. No rank trains. `ranks.ts` starts these.
 *
 *   bun ranks-part.ts FIRST_HOST HOSTS RANKS_A_HOST WORLD_SIZE PORT      plays these hosts; rank 0 only if FIRST_HOST is "root"
 *
 * Prints a line of JSON when all its ranks have met, at rank 0 when all of the run have joined, and when a host knows of a
 * failure. Reads lines: "status", "fail RANK", "finish".
 */
import { readdirSync, readFileSync, readlinkSync, statSync } from "node:fs";
import { createInterface } from "node:readline";
import { configurationOf } from "../../src/config/resolve.ts";
import { textOf } from "../../src/config/schema.ts";
import { identityOf, joinRun } from "../../src/launch/join.ts";
import { AuthenticatedConnection } from "../../src/launch/rendezvous/authenticated-connection.ts";
import type { Run } from "../../src/native/run.ts";
import { divisibleModel } from "../models/small.ts";
import { testLibrary } from "../support.ts";

const [what, ...numbers] = process.argv.slice(2);
const [hosts, each, worldSize, port] = numbers.map(Number) as [number, number, number, number];
const root = what === "root";
const library = await testLibrary();
const configuration = textOf(configurationOf(divisibleModel));

/** Messages of rank 0 while ranks meet. */
const met = { sent: 0, received: 0 };
const { send, receive } = AuthenticatedConnection.prototype;
AuthenticatedConnection.prototype.send = function (value) {
	met.sent++;
	send.call(this, value);
};
AuthenticatedConnection.prototype.receive = async function (milliseconds) {
	const value = await receive.call(this, milliseconds);
	if (value !== undefined) met.received++;
	return value;
};

function say(event: string, about: object = {}): void {
	console.log(JSON.stringify({ event, at: performance.timeOrigin + performance.now(), ...about }));
}

function openSockets(): number {
	return readdirSync("/proc/self/fd").filter((fd) => {
		try {
			return readlinkSync(`/proc/self/fd/${fd}`).startsWith("socket:");
		} catch {
			return false;
		}
	}).length;
}

/** Since Linux 6.2 the folder's size, which costs nothing to ask for, tells their number. */
function openDescriptors(): number {
	return statSync("/proc/self/fd").size || readdirSync("/proc/self/fd").length;
}

function kilobytes(name: string): number {
	return Number(RegExp(`^${name}:\\s+(\\d+)`, "m").exec(readFileSync("/proc/self/status", "utf8"))?.[1] ?? 0);
}

function status(): object {
	const relayed = runs[0]?.relayed() ?? { sent: 0, received: 0 };
	const { user, system } = process.cpuUsage();
	const memory = { resident: kilobytes("VmRSS"), shared: kilobytes("RssShmem") };
	const sockets = root ? { sockets: openSockets(), mostSockets } : {};
	return { ...sockets, met, relayed, ...memory, processor: (user + system) / 1e6 };
}

const runs: Run[] = [];
let mostSockets = 0;
const others = openDescriptors() - openSockets();
const look = setInterval(() => {
	if (root) mostSockets = Math.max(mostSockets, openDescriptors() - others);
}, 100);

async function playRank(host: number, localRank: number): Promise<void> {
	const rank = host * each + localRank;
	const place = {
		rank,
		worldSize,
		localRank,
		localSize: each,
		address: "127.0.0.1",
		port,
		secret: "played",
		launcher: null,
	};
	const named = { library: "cuda", host: `node-${host}`, machine: `node ${host}` };
	const identity = { ...identityOf(rank, worldSize, { library, version: "played", configuration }), ...named };
	const run = await joinRun(place, identity, library, 10);
	run.describe(rank, "language", `dp ${rank}`);
	run.join(rank);
	if (localRank === 0) {
		runs.push(run);
		return;
	}
	run.leave();
	run[Symbol.dispose]();
}

say("begins", status());
const first = root ? 0 : Number(what);
const ranks = Array.from({ length: root ? 1 : hosts }, (_, index) =>
	Array.from({ length: each }, (_, local) => [first + index, local] as const),
)
	.flat()
	.filter(([host, local]) => (root ? local === 0 : host > 0 || local > 0));
await Promise.all(ranks.map(([host, local]) => playRank(host, local)));
clearInterval(look);
say("met", root ? status() : {});

const known = new Set<Run>();
const watch = setInterval(() => {
	if (root && !known.has(runs[0]!) && runs[0]!.progressSummary().joined === worldSize) {
		known.add(runs[0]!);
		say("joined", status());
	}
	for (const [index, run] of runs.entries()) {
		const failure = known.has(run) && !root ? null : run.watch();
		if (failure === null) continue;
		known.add(run);
		say("failed", { host: first + index, ...failure });
		if (root) conclude(run);
	}
}, 20);

function conclude(run: Run): void {
	clearInterval(watch);
	run.conclude(69);
	say("concluded");
	process.exit(69);
}

for await (const line of createInterface({ input: process.stdin })) {
	const [command, rank] = line.split(" ");
	if (command === "status") say("status", status());
	if (command === "fail")
		runs
			.find((_, index) => first + index === Math.floor(Number(rank) / each))!
			.fail(Number(rank), "Sample 17 holds no image.");
	if (command === "finish") {
		clearInterval(watch);
		for (const run of runs) run.leave();
		for (const run of runs) run[Symbol.dispose]();
		process.exit(0);
	}
}
