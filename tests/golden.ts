/** Finds reference folders (made by other systems): tests/golden, then MIMO_GOLDEN, then ../shared/golden. */
import { existsSync } from "node:fs";
import { join, resolve } from "node:path";

const root = join(import.meta.dir, "..");
const places = [
	join(root, "tests/golden"),
	...(process.env.MIMO_GOLDEN ? [resolve(process.env.MIMO_GOLDEN)] : []),
	resolve(root, "../shared/golden"),
];

/**
 * The folder of a reference run, or null when this machine lacks it: then the caller skips its test. Absence fails in
 * CI (CI=true), where every reference must be there; elsewhere it prints a line.
 */
export function golden(name: string): string | null {
	const found = places.map((place) => join(place, name)).find((folder) => existsSync(folder));
	return found ?? absent(`reference folder ${name} is absent (name its parent folder in MIMO_GOLDEN)`);
}

/** What a test does about a thing it needs and this machine lacks: an error in CI, else a printed skip and null. */
export function absent(what: string): null {
	if (process.env.CI === "true") throw new Error(`In CI nothing may be skipped: ${what}.`);
	return skip(what);
}

/**
 * The same about a build that `npm test` does not make, such as the CUDA library: an error where they are made first,
 * which .ci/run says by MIMO_REQUIRE_BUILDS=true, else a printed skip and null.
 */
export function absentBuild(what: string, command: string): null {
	const sentence = `${what} is not built (${command})`;
	if (process.env.MIMO_REQUIRE_BUILDS === "true") throw new Error(`Builds may not be skipped here: ${sentence}.`);
	return skip(sentence);
}

function skip(what: string): null {
	console.error(`skip: ${what}`);
	return null;
}
