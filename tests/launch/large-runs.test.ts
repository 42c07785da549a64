/**
 * A run of 64 hosts, whose tree has two levels: it starts, finishes, and ends when a host with children fails.
 * `bun tests/bench/ranks.ts` plays larger runs.
 */
import { expect, test } from "bun:test";
import { blamed, playFailure, startOf } from "../bench/ranks.ts";

const [hosts, each] = [64, 2];
const fanOut = 32;

test("64 hosts start and finish, and rank 0 keeps few connections", async () => {
	const { joined, after, rate } = await startOf(hosts, each);
	// Five beats a second in both directions, and a poll may come early.
	expect(rate).toBeLessThan(2 * 5 * fanOut * 1.5);
	expect(after.sockets - joined.mostSockets).toBeLessThan(0);
	expect(after.sockets).toBeLessThan(fanOut + 16);
}, 60_000);

test("a host with children fails: all hosts learn the same failed rank", async () => {
	const { seconds, ranks, hosts: informed, diagnosis } = await playFailure("kill", hosts, each);
	expect({ informed, ranks }).toEqual({ informed: hosts - 1, ranks: [blamed("kill", hosts, each)] });
	expect(seconds).toBeLessThan(10);
	expect(diagnosis).toMatch(
		/^mimo: rank 2 \(language, dp 2; .*\) failed: its process has ended or its host is cut off/,
	);
	expect(diagnosis).toContain("each of which did not report after the failure.");
}, 60_000);
