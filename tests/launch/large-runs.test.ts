/**
 * A run of 64 hosts, so that some have hosts below them and others are two connections from rank 0's: it starts, finishes, and
 * ends when a host in the middle is gone. `bun tests/bench/ranks.ts` plays larger ones.
 */
import { expect, test } from "bun:test";
import { blamed, playFailure, startOf } from "../bench/ranks.ts";

const [hosts, each] = [64, 2];
const fanOut = 32;

test("64 hosts start and finish, with few connections to rank 0 afterwards", async () => {
	const { joined, after, rate } = await startOf(hosts, each);
	// Both ways, five beats a second, and a look may come early.
	expect(rate).toBeLessThan(2 * 5 * fanOut * 1.5);
	expect(after.sockets - joined.mostSockets).toBeLessThan(0);
	expect(after.sockets).toBeLessThan(fanOut + 16);
}, 60_000);

test("a host with hosts below it is gone: all hosts know of it, by one name", async () => {
	const { seconds, ranks, hosts: told, diagnosis } = await playFailure("kill", hosts, each);
	expect({ told, ranks }).toEqual({ told: hosts - 1, ranks: [blamed("kill", hosts, each)] });
	expect(seconds).toBeLessThan(10);
	expect(diagnosis).toMatch(
		/^mimo: rank 2 \(language, dp 2; .*\) failed: its process has ended or its host is cut off/,
	);
	expect(diagnosis).toContain("each of which was not heard of after the failure.");
}, 60_000);
