/** Descriptors that rank 0 needs for the rendezvous. */
import { expect, test } from "bun:test";
import { connectionsOf, requireDescriptors } from "../../src/launch/join.ts";

const limits = (count: number | "unlimited") =>
	`Limit                     Soft Limit           Hard Limit           Units\nMax open files            ${count}                 ${count}                 files\n`;

test("rank 0 has a connection for each other host and each other rank of its own", () => {
	expect(connectionsOf({ localSize: 8, worldSize: 4096 })).toBe(511 + 7);
	expect(connectionsOf({ localSize: 4, worldSize: 4 })).toBe(3);
});

test("too few descriptors are refused, with the needed number", () => {
	const place = { localSize: 8, worldSize: 65536 };
	expect(() => requireDescriptors(place, limits(4096))).toThrow(
		"Rank 0 needs 8262 descriptors for the connections of the others, and the system allows 4096: raise the hard limit of ulimit -n on its host.",
	);
	for (const text of [limits(8262), limits("unlimited"), ""]) requireDescriptors(place, text);
});

test("this program has raised its limit to what the system allows", () => {
	const read = "console.log(require('fs').readFileSync('/proc/self/limits', 'utf8'))";
	const { stdout } = Bun.spawnSync(["sh", "-c", `ulimit -Sn 200; "${process.execPath}" -e "${read}"`]);
	const [, soft, hard] = /^Max open files\s+(\S+)\s+(\S+)/m.exec(stdout.toString())!;
	expect(soft).toBe(hard);
});
