/** A host fails while the hosts create their shared memory: its children in the tree cannot connect, and the failed host is named. */
import { afterEach, expect, test } from "bun:test";
import { join } from "node:path";
import { createHostMemory, createRun } from "../../src/launch/hosts.ts";
import { joinRendezvous } from "../../src/launch/rendezvous/client.ts";
import type { Identity } from "../../src/launch/rendezvous/messages.ts";
import { RendezvousServer } from "../../src/launch/rendezvous/server.ts";
import { HOST_FAN_OUT } from "../../src/native/abi.ts";
import type { Library } from "../../src/native/library.ts";
import { testLibrary } from "../support.ts";

const address = "127.0.0.1";
const secret = "a secret";
/** Host 1 has one child, the last host. */
const hosts = HOST_FAN_OUT + 2;
const options = { secret, address, ranks: hosts, timeoutMinutes: 1 };
const open: Disposable[] = [];
afterEach(() => {
	for (const resource of open.splice(0)) resource[Symbol.dispose]();
});

/** The only rank of its host. */
function identity(rank: number): Identity {
	const program = { version: "0.1.0", abi: 2, library: "cuda", configuration: { seed: "1" } };
	return { rank, worldSize: hosts, host: `node-${rank}`, machine: `node ${rank}`, pid: 100 + rank, ...program };
}

function joinRun(port: number, rank: number, library: Library): Promise<string> {
	const place = { rank, worldSize: hosts, localRank: 0, localSize: 1, address, port, secret, launcher: null };
	return joinRendezvous(place, identity(rank), 20_000, (request, addresses) => {
		const { run, port } = createHostMemory(request, addresses, library, options);
		open.push(run);
		return { run: run.path, port };
	});
}

/** Host 1, in a process of its own, creates its shared memory, replies, and dies. */
async function joinAndDie(port: number): Promise<void> {
	const program = join(import.meta.dir, "lost-parent-program.ts");
	const about = JSON.stringify({ port, identity: identity(1), options });
	await Bun.spawn([process.execPath, program, about], { stdout: "ignore", stderr: "inherit" }).exited;
}

test("a host that dies before its children have connected is named on all hosts", async () => {
	const library = await testLibrary();
	const server = await RendezvousServer.open(address, 0, secret, identity(0));
	open.push(server);
	const others = Array.from({ length: hosts - 2 }, (_, index) => joinRun(server.port, index + 2, library));
	const sentences = Promise.all(others.map((joined) => joined.then(String, (error: Error) => error.message)));
	const lost = joinAndDie(server.port);
	const ranks = Array.from({ length: hosts - 1 }, (_, index) => index + 1);
	await server.waitForRanks(ranks, 20_000);
	const began = performance.now();
	const sentence = await createRun(server, identity(0), library, options).then(String, (error: Error) => error.message);
	await lost;
	expect(sentence).toBe("rank 1 (host node-1, process 101) disconnected before all ranks had joined.");
	// The child, which is the last, reports its own failure to connect.
	expect(new Set((await sentences).slice(0, -1))).toEqual(new Set([sentence]));
	expect(performance.now() - began).toBeLessThan(10_000);
}, 30_000);
