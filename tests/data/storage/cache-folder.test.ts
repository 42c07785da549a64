/** The folder of the block cache: where it is, whose it may be, its key. */
import { afterAll, expect, test } from "bun:test";
import { chmodSync, chownSync, mkdirSync, readFileSync, rmSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { openCacheFolder } from "../../../src/data/energon/storage/block-cache.ts";
import { defaultCacheFolder } from "../../../src/system/private-folder.ts";
import { Scratch } from "../fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

let folders = 0;
/** A parent, and where the cache's own folder is in it. */
function place(): [parent: string, own: string] {
	const parent = join(scratch.path, `p${folders++}`);
	const { path } = openCacheFolder(parent);
	rmSync(path, { recursive: true });
	return [parent, path];
}

test("the folder is below the user's cache folder, not below shared temporary folders", () => {
	const own = join(homedir(), ".cache", "mimo");
	expect(defaultCacheFolder({})).toBe(own);
	expect(defaultCacheFolder({ XDG_CACHE_HOME: "/var/cache/me" })).toBe("/var/cache/me/mimo");
	expect(defaultCacheFolder({ XDG_CACHE_HOME: "relative" })).toBe(own);
});

test("only the user can access folder and key, and every process finds the same key", () => {
	const [parent, own] = place();
	const first = openCacheFolder(parent);
	expect(statSync(own).mode & 0o777).toBe(0o700);
	expect(statSync(join(own, "key")).mode & 0o777).toBe(0o600);
	expect(openCacheFolder(parent)).toEqual(first);
	expect(first.key).toHaveLength(32);
	expect(openCacheFolder(place()[0]).key).not.toEqual(first.key);
});

test("a folder that others can write to or read is refused", () => {
	const [parent, own] = place();
	mkdirSync(own, { mode: 0o700 });
	chmodSync(own, 0o755);
	expect(() => openCacheFolder(parent)).toThrow(`The cache folder ${own} is open to other users`);
});

test("a link in its place is refused", () => {
	const [parent, own] = place();
	symlinkSync(scratch.path, own);
	expect(() => openCacheFolder(parent)).toThrow("is a symbolic link");
});

test("a file in its place is refused", () => {
	const [parent, own] = place();
	writeFileSync(own, "");
	expect(() => openCacheFolder(parent)).toThrow("is not a folder");
});

test.skipIf(process.getuid!() !== 0)("another user's folder is refused", () => {
	const [parent, own] = place();
	mkdirSync(own, { mode: 0o700 });
	chownSync(own, 65534, 65534);
	expect(() => openCacheFolder(parent)).toThrow("belongs to another user (65534)");
});

for (const [what, plant] of [
	["that others can read", (path: string) => chmodSync(path, 0o644)],
	["of another length", (path: string) => writeFileSync(path, "short")],
	[
		"that is a link",
		(path: string) => {
			const moved = `${path}-moved`;
			writeFileSync(moved, readFileSync(path), { mode: 0o600 });
			rmSync(path);
			symlinkSync(moved, path);
		},
	],
] as const) {
	test(`a key ${what} is refused`, () => {
		const [parent, own] = place();
		openCacheFolder(parent);
		plant(join(own, "key"));
		expect(() => openCacheFolder(parent)).toThrow(join(own, "key"));
	});
}

test("a folder that cannot be made is named, with the flag that names another", () => {
	const file = scratch.file("file", "");
	expect(() => openCacheFolder(join(file, "below"))).toThrow(
		/mimo-blocks-v1-\d+ cannot be made: .*--data-cache-folder/,
	);
});
