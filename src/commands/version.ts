/** `mimo --version`: version, commit, ABI version and the native libraries inside the executable, one line. */
import { ABI_VERSION } from "../native/abi.ts";
import { embeddedLibraries } from "../native/embedded.ts";
import { type DeviceKind, openLibrary } from "../native/library.ts";
import { programVersion } from "../native/program-version.ts";

/** What the embedded libraries say they contain; one that does not load on this machine is named only. */
async function libraries(): Promise<string[]> {
	const described = Object.entries(embeddedLibraries).map(async ([kind, locate]) => {
		if ((await locate()) === null) return [];
		// What it opens is the machine's: `mimo doctor` tells.
		if (kind === "cuda") return [kind];
		try {
			return [`${kind} (${(await openLibrary(kind as DeviceKind)).versions})`];
		} catch {
			return [kind];
		}
	});
	return (await Promise.all(described)).flat();
}

export async function versionLine(): Promise<string> {
	const embedded = await libraries();
	const contents = embedded.length === 0 ? "none" : embedded.join(", ");
	return `mimo ${programVersion()}, ABI ${ABI_VERSION}, libraries: ${contents}`;
}
