/** The hosts of a run's ranks in few numbers, and the tree of hosts. */
import { describe, expect, test } from "bun:test";
import { hostsFrom, levelsOf, parentOf, placementOf } from "../../src/launch/hosts.ts";

const equalHosts = Array.from({ length: 4096 }, (_, rank) => Math.floor(rank / 8));
const inTurns = Array.from({ length: 512 * 8 }, (_, rank) => rank % 512);
const uneven = [0, 0, 0, 1, 2, 2, 1, 0];

describe("a placement", () => {
	for (const [name, hostOfRank, runs] of [
		["of equal hosts is one run", equalHosts, [[0, 8, 512]]],
		["in turns is a run a turn", inTurns, Array.from({ length: 8 }, () => [0, 1, 512])],
		[
			"of uneven hosts has an entry for each host",
			uneven,
			[
				[0, 3, 1],
				[1, 1, 1],
				[2, 2, 1],
				[1, 1, 1],
				[0, 1, 1],
			],
		],
	] as const) {
		test(name, () => {
			expect(placementOf(hostOfRank) as unknown).toEqual(runs);
			expect(hostsFrom(placementOf(hostOfRank), hostOfRank.length)).toEqual([...hostOfRank]);
		});
	}

	test("received from another process decodes to at most as many ranks as the run has", () => {
		expect(hostsFrom([[0, 1e9, 1e9]], 3)).toEqual([0, 0, 0]);
	});
});

describe("the tree of hosts", () => {
	test("of up to 33 hosts is a star", () => {
		expect(levelsOf(33)).toEqual([Array.from({ length: 32 }, (_, index) => index + 1)]);
	});

	test("gives every host a parent of the level above, and no parent more than 32 children", () => {
		const levels = levelsOf(8192);
		expect(levels.map((level) => level.length)).toEqual([32, 1024, 7135]);
		const children = new Map<number, number>();
		levels.forEach((level, depth) => {
			for (const host of level) {
				const parent = parentOf(host);
				expect(depth === 0 ? parent === 0 : levels[depth - 1]!.includes(parent)).toBe(true);
				children.set(parent, (children.get(parent) ?? 0) + 1);
			}
		});
		expect(Math.max(...children.values())).toBe(32);
	});
});
