/** Files that others may have made: what is opened, how much of it is read, and where links may lead. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { InputFile, linesOf, readWholeFile, readWholeText } from "../../src/system/input-file.ts";

let folder: string;
const at = (name: string) => join(folder, name);
function file(name: string, content: string): string {
	mkdirSync(dirname(at(name)), { recursive: true });
	writeFileSync(at(name), content);
	return at(name);
}
function link(name: string, target: string): string {
	mkdirSync(dirname(at(name)), { recursive: true });
	symlinkSync(target, at(name));
	return at(name);
}
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-input-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

test("pipes, sockets, devices and folders are refused at once", async () => {
	Bun.spawnSync(["mkfifo", at("pipe")]);
	const server = createServer().listen(at("socket"));
	await new Promise((resolve) => server.once("listening", resolve));
	try {
		for (const [path, reason] of [
			[at("pipe"), "it is not a regular file"],
			[at("socket"), "it is not a regular file"],
			["/dev/zero", "it is not a regular file"],
			[link("zero", "/dev/zero"), "it is not a regular file"],
			[folder, "it is a folder"],
			[at("absent"), "it does not exist"],
			[link("circle", "circle"), "it is a symbolic link, or links lead in a circle"],
		] as const) {
			expect(() => readWholeText(path, 100)).toThrow(`Cannot open ${path}: ${reason}.`);
			expect(() => readWholeText(path, 100, { called: "the list" })).toThrow(`Cannot open the list: ${reason}.`);
		}
	} finally {
		server.close();
	}
});

test("a file of more bytes than the bound is refused unread", () => {
	const path = file("large", "12345");
	expect(readWholeText(path, 5)).toBe("12345");
	expect(() => readWholeFile(path, 4)).toThrow(`${path} has 5 bytes, more than the 4 that are read of such a file.`);
});

describe("links", () => {
	const refused = (path: string, inside: string) =>
		expect(() => InputFile.open(path, { inside })).toThrow(/: it is a link that leads out of its folder, to \//);

	test("within the folder are followed, those out of it are not, even over a folder that is a link", () => {
		file("secret/id_rsa", "secret");
		file("model/LICENSE", "licence");
		expect(readWholeText(link("model/copy", "LICENSE"), 100, { inside: at("model") })).toBe("licence");
		for (const target of ["../secret/id_rsa", at("secret/id_rsa"), "../model-2/x"]) {
			file("model-2/x", "a neighbour whose name begins alike");
			rmSync(at("model/out"), { force: true });
			refused(link("model/out", target), at("model"));
		}
		link("model/sub", "../secret");
		refused(at("model/sub/id_rsa"), at("model"));
		// The folder itself may be a link, and so may a path without a folder.
		link("alias", "model");
		expect(readWholeText(at("alias/copy"), 100, { inside: at("alias") })).toBe("licence");
		expect(readWholeText(at("model/out"), 100)).toBe("a neighbour whose name begins alike");
		expect(() => InputFile.open(at("model/copy"), { followLinks: false })).toThrow("it is a symbolic link");
	});

	test("of the download cache lead to the blobs of the same repository, and no further", () => {
		const repository = "hub/models--nvidia--nemotron";
		file(`${repository}/blobs/1f2e`, "{}");
		file("hub/models--other--model/blobs/77aa", "{}");
		const snapshot = `${repository}/snapshots/0a1b`;
		link(`${snapshot}/tokenizer.json`, "../../blobs/1f2e");
		link(`${snapshot}/deep/tokenizer.json`, "../../../blobs/1f2e");
		expect(readWholeText(at(`${snapshot}/tokenizer.json`), 9, { inside: at(snapshot) })).toBe("{}");
		expect(readWholeText(at(`${snapshot}/deep/tokenizer.json`), 9, { inside: at(`${snapshot}/deep`) })).toBe("{}");
		refused(link(`${snapshot}/other`, "../../../models--other--model/blobs/77aa"), at(snapshot));
		refused(link(`${snapshot}/LICENSE`, at("secret/id_rsa")), at(snapshot));
		file(`${repository}/refs/main`, "0a1b");
		refused(link(`${snapshot}/refs`, "../../refs/main"), at(snapshot));
		// A blob that is a link out, and blobs that are.
		link(`${repository}/blobs/bad`, at("secret/id_rsa"));
		refused(link(`${snapshot}/bad`, "../../blobs/bad"), at(snapshot));
		link("planted/blobs", at("secret"));
		refused(link("planted/snapshots/1/LICENSE", "../../blobs/id_rsa"), at("planted/snapshots/1"));
	});
});

describe("lines", () => {
	const lines = (path: string, unended: boolean, limit = 100) =>
		Array.from(linesOf(path, { limit, unended }), ({ number, bytes }) => `${number} ${bytes}`);

	test("are numbered, over the borders of what is read at once, with or without an end of the last", () => {
		expect(lines(file("lines", "a\n\nb\r\nc"), true)).toEqual(["1 a", "2 ", "3 b\r", "4 c"]);
		expect(lines(at("lines"), false)).toEqual(["1 a", "2 ", "3 b\r"]);
		expect(lines(file("none", ""), true)).toEqual([]);
		const long = Array.from({ length: 5 }, (_, i) => String(i).repeat(700_000));
		expect(lines(file("long", `${long.join("\n")}\n`), true, 1e6)).toEqual(long.map((line, i) => `${i + 1} ${line}`));
	});

	test("longer than the bound are named before they are whole", () => {
		const path = file("wide", `a\n${"b".repeat(3_000_000)}`);
		const numbers: number[] = [];
		expect(() => {
			for (const { number } of linesOf(path, { limit: 1000, unended: true })) numbers.push(number);
		}).toThrow(`${path}, line 2 has more than 1000 bytes.`);
		expect(numbers).toEqual([1]);
	});
});
