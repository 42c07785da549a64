/** Folders that cannot be written are refused before anything is trained, each with its own reason. */
import { afterAll, expect, test } from "bun:test";
import {
	existsSync,
	mkdirSync,
	mkdtempSync,
	readdirSync,
	readFileSync,
	rmSync,
	statfsSync,
	symlinkSync,
	writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { roomProblem, tryFile, tryFolder } from "../../src/checkpoint/save-folder.ts";
import { UserError } from "../../src/system/errors.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-save-folder-"));
afterAll(() => rmSync(folder, { recursive: true }));
const at = (name: string) => join(folder, name);
writeFileSync(at("file"), "");
symlinkSync(at("absent"), at("link"));

test("a folder is made, tried and left empty", () => {
	tryFolder("--save a", at("made/below"));
	expect(readdirSync(at("made/below"))).toEqual([]);
});

const refused: readonly [name: string, path: string, reason: string][] = [
	["a link to nothing", at("link"), `${at("link")} is a link to ${at("absent")}, which does not exist`],
	["a folder below it", at("link/a"), `${at("link")} is a link to ${at("absent")}, which does not exist`],
	["a file", at("file"), `${at("file")} is not a folder`],
	["a folder below a file", at("file/a/b"), `${at("file")} is not a folder`],
	["a place without folders of users", "/proc/absent/a", "no folder can be made there"],
	["a name that no file system has room for", at("n".repeat(300)), "its name is too long"],
];
for (const [name, path, reason] of refused) {
	test(`${name} is refused`, () => {
		expect(() => tryFolder("--save PATH", path)).toThrow(new UserError(`--save PATH cannot be written: ${reason}.`));
		expect(existsSync(at("absent"))).toBeFalse();
	});
}

test("the folder of a later file is checked too", () => {
	expect(() => tryFolder("--save-hf PATH", folder, at("file"))).toThrow(`${at("file")} is not a folder`);
	tryFolder("--save-hf PATH", folder, at("later"));
	expect(existsSync(at("later"))).toBeFalse();
});

test("a checkpoint that does not fit is refused with its bytes", () => {
	const { bsize, blocks } = statfsSync(folder);
	mkdirSync(at("room"));
	expect(roomProblem("--save room: a checkpoint", at("room"), 1)).toBeNull();
	expect(roomProblem("--save room: a checkpoint", at("room/made/later"), 1)).toBeNull();
	expect(roomProblem("--save room: a checkpoint", at("room"), bsize * blocks + 1)).toMatch(
		new RegExp(
			`^--save room: a checkpoint needs [\\d.]+ .B \\(${bsize * blocks + 1} bytes\\), but only [\\d.]+ .?B \\(\\d+ bytes\\) are free there\\.$`,
		),
	);
});

test("a file that will be written later is tried by its folder, and left alone", () => {
	expect(() => tryFile("--data-skipped-file PATH", folder)).toThrow(
		"--data-skipped-file PATH cannot be written: it is a folder.",
	);
	expect(() => tryFile("--profile-file PATH", at("file/trace.json"))).toThrow(
		`cannot be written: ${at("file")} is not a folder.`,
	);
	writeFileSync(at("kept"), "text");
	tryFile("--profile-file PATH", at("kept"));
	expect(readFileSync(at("kept"), "utf8")).toBe("text");
});
