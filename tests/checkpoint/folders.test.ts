/** Folders that appear whole under their name. */
import { afterAll, expect, test } from "bun:test";
import {
	lstatSync,
	mkdirSync,
	mkdtempSync,
	readdirSync,
	readFileSync,
	rmSync,
	symlinkSync,
	writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { writeFolderAtomically } from "../../src/checkpoint/folders.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-folders-"));
const at = (name: string) => join(folder, name);
afterAll(() => rmSync(folder, { recursive: true }));

test("a link to a folder stays, and the folder behind it is written and replaced", async () => {
	for (const name of ["disk/model", "here"]) mkdirSync(at(name), { recursive: true });
	symlinkSync("../disk/model", at("here/model"));
	for (const [text, replace] of [
		["first", false],
		["second", true],
	] as const) {
		await writeFolderAtomically(at("here/model"), { replace }, (path) => writeFileSync(join(path, "weights"), text));
		expect(readFileSync(at("disk/model/weights"), "utf8")).toBe(text);
	}
	expect([lstatSync(at("here/model")).isSymbolicLink(), readdirSync(at("disk")), readdirSync(at("here"))]).toEqual([
		true,
		["model"],
		["model"],
	]);
});
