/**
 * The rendezvous of large runs at rank 0, alone, up to 65,536 ranks: hosts join, register their ranks, receive the requests for their
 * shared memory level by level, and receive its path. They answer at once, so that only rank 0's own work is timed.
 *
 *   bun tests/bench/rendezvous.ts [--hosts 64,512,4096,8192] [--ranks-a-host 8]
 *
 * Prints for each number of hosts the seconds from the first connection until all ranks have joined, and until all hosts have the path;
 * and of rank 0's process the processor time and the additional memory. All hosts share this machine.
 */
import { parseArgs } from "node:util";
import { configurationOf } from "../../src/config/resolve.ts";
import { textOf } from "../../src/config/schema.ts";
import { levelsOf, parentOf, placementOf } from "../../src/launch/hosts.ts";
import { joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import type { Identity } from "../../src/launch/rendezvous/messages.ts";
import { RendezvousServer } from "../../src/launch/rendezvous/server.ts";
import { divisibleModel } from "../models/small.ts";

const address = "127.0.0.1";
const secret = "played";
/** Processes that play the hosts. */
const players = 8;
const milliseconds = 300_000;
const configuration = textOf(configurationOf(divisibleModel));

function identity(rank: number, worldSize: number, host: number): Identity {
	const program = { version: "played", abi: 1, library: "cuda", configuration };
	return { rank, worldSize, host: `node-${host}`, machine: `node ${host}`, pid: 1000 + rank, ...program };
}

/** Host `host` joins with its `each` ranks. */
async function playHost(host: number, each: number, hosts: number, port: number): Promise<void> {
	const [rank, worldSize] = [host * each, hosts * each];
	const place = { rank, worldSize, localRank: 0, localSize: each, address, port, secret, launcher: null };
	const others = Array.from({ length: each - 1 }, (_, index) => rank + 1 + index);
	const localRanks = others.map((other) => ({ rank: other, pid: 1000 + other, host: `node-${host}` }));
	const memory = () => ({ run: `/proc/${1000 + rank}/fd/12`, port: 40_000 });
	await joinRendezvous(place, identity(rank, worldSize, host), milliseconds, memory, {
		forwardTo: (send) => send({ localRanks }),
		announceRun: () => {},
		announceFailure: () => {},
	});
}

/** Rank 0 of `hosts` hosts. */
async function joinAll(hosts: number, each: number): Promise<string> {
	const resident = process.memoryUsage.rss();
	using host = await RendezvousServer.open(address, 0, secret, identity(0, hosts * each, 0));
	const share = Math.ceil((hosts - 1) / players);
	const processes = Array.from({ length: players }, (_, index) => 1 + index * share)
		.filter((first) => first < hosts)
		.map((first) => {
			const args = [first, Math.min(share, hosts - first), each, hosts, host.port].map(String);
			return Bun.spawn([process.execPath, import.meta.path, "play", ...args], { stderr: "inherit" });
		});
	const others = Array.from({ length: hosts * each }, (_, rank) => rank).filter((rank) => rank >= each);
	const gathered = host.waitForRanks(others, milliseconds);
	while (host.members.size === 0) await Bun.sleep(1);
	const [began, worked] = [performance.now(), process.cpuUsage()];
	await gathered;
	const met = performance.now();
	const placement = placementOf(Array.from({ length: hosts * each }, (_, rank) => Math.floor(rank / each)));
	for (const level of levelsOf(hosts)) {
		const request = (index: number) => ({
			placement,
			host: index,
			parent: { address: parentOf(index) === 0 ? null : address, port: 40_000 },
			nonce: "ab".repeat(32),
		});
		await Promise.all(level.map((index) => host.requestHostMemory(index * each, request(index))));
	}
	host.announceRun("/proc/1000/fd/12");
	const ended = performance.now();
	const { user, system } = process.cpuUsage(worked);
	const memory = process.memoryUsage.rss() - resident;
	const codes = await Promise.all(processes.map((one) => one.exited));
	if (codes.some((code) => code !== 0)) throw new Error(`Hosts ended with ${codes}.`);
	const seconds = [met - began, ended - began].map((ms) => (ms / 1000).toFixed(2)).join("  ");
	return `${hosts}  ${hosts * each}  ${seconds}  ${((user + system) / 1e6).toFixed(2)} s  ${(memory / 2 ** 20).toFixed(1)} MiB`;
}

const [what, ...numbers] = process.argv.slice(2);
if (what === "play") {
	const [first, count, each, hosts, port] = numbers.map(Number) as [number, number, number, number, number];
	await Promise.all(Array.from({ length: count }, (_, index) => playHost(first + index, each, hosts, port)));
	process.exit(0);
}
const { values: flags } = parseArgs({
	options: {
		hosts: { type: "string", default: "64,512,4096,8192" },
		"ranks-a-host": { type: "string", default: "8" },
	},
});
console.log("hosts  ranks  joined, s  ready, s  rank 0's processor  memory");
for (const hosts of flags.hosts.split(",")) console.log(await joinAll(Number(hosts), Number(flags["ranks-a-host"])));
process.exit(0);
