/** Counts with their nouns, and no message that spells a count's noun in another way. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { counted } from "../../src/system/counted.ts";

test("a noun follows its count", () => {
	expect([0, 1, 2].map((count) => counted(count, "rank"))).toEqual(["0 ranks", "1 rank", "2 ranks"]);
	expect(counted(1, "entry", "entries")).toBe("1 entry");
	expect(counted(3, "entry", "entries")).toBe("3 entries");
});

test("an ending that depends on a count is written in one place", () => {
	const root = join(import.meta.dir, "../../src");
	const own = [...new Bun.Glob("**/*.ts").scanSync(root)].filter((file) =>
		/=== 1 \? "" : "s"/.test(readFileSync(join(root, file), "utf8")),
	);
	expect(own).toEqual([]);
});
