/**
 * Finds reference folders (made by other systems): tests/golden, where a large one is an archive that is unpacked into
 * build/golden, then MIMO_GOLDEN, then ../shared/golden.
 */
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";

const root = join(import.meta.dir, "..");
const inRepository = join(root, "tests/golden");
const elsewhere = [
	...(process.env.MIMO_GOLDEN ? [resolve(process.env.MIMO_GOLDEN)] : []),
	resolve(root, "../shared/golden"),
];

/** The folder of a reference that the repository holds; its absence is an error. */
export function golden(name: string): string {
	const folder = join(inRepository, name);
	if (existsSync(folder)) return folder;
	const archive = `${folder}.tar.zst`;
	if (existsSync(archive)) return unpack(archive, name);
	throw new Error(`The repository holds no reference ${name}: neither ${folder} nor ${archive} exists.`);
}

/**
 * The folder of a reference that is too large for the repository, or null on a machine that lacks it, after a printed
 * skip: its small relative in tests/golden is compared everywhere.
 */
export function largeGolden(name: string): string | null {
	const found = elsewhere.map((place) => join(place, name)).find((folder) => existsSync(folder));
	return found ?? skip(`reference folder ${name} is absent (name its parent folder in MIMO_GOLDEN)`);
}

/** Unpacks an archive once for all processes: a folder of build/golden named by the archive's digest. */
function unpack(archive: string, name: string): string {
	const bytes = readFileSync(archive);
	const digest = createHash("sha256").update(bytes).digest("hex").slice(0, 16);
	const target = join(root, "build/golden", digest);
	if (!existsSync(target)) {
		mkdirSync(join(root, "build/golden"), { recursive: true });
		const unfinished = mkdtempSync(`${target}.`);
		const { success, stderr } = Bun.spawnSync(["tar", "-xf", "-", "-C", unfinished], {
			stdin: Bun.zstdDecompressSync(bytes),
		});
		if (!success) throw new Error(`${archive} cannot be unpacked: ${stderr}`);
		try {
			renameSync(unfinished, target);
		} catch (error) {
			// Another process was first.
			rmSync(unfinished, { recursive: true });
			if (!existsSync(target)) throw error;
		}
	}
	return join(target, name);
}

/** Reports a thing that a test needs and this machine lacks: an error in CI, else a printed skip and null. */
export function absent(what: string): null {
	if (process.env.CI === "true") throw new Error(`In CI nothing may be skipped: ${what}.`);
	return skip(what);
}

/**
 * The same about what `npm test` does not make, such as the CUDA library or the reference Python: an error where it is made
 * first, which .ci/run says by MIMO_REQUIRE_BUILDS=true, else a printed skip and null.
 */
export function absentBuild(what: string, command: string): null {
	const sentence = `${what} is absent (${command})`;
	if (process.env.MIMO_REQUIRE_BUILDS === "true") throw new Error(`Builds may not be skipped here: ${sentence}.`);
	return skip(sentence);
}

function skip(what: string): null {
	console.error(`skip: ${what}`);
	return null;
}
