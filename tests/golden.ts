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
	if (found === undefined)
		console.error(`skip: reference folder ${name} is absent (MIMO_GOLDEN names its parent folder)`);
	return found ?? null;
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
