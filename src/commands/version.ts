/** `mimo --version`: version, commit, ABI version, the native libraries inside the executable and Bun, one line. */
import { ABI_VERSION } from "../native/abi.ts";
import { embeddedLibraries } from "../native/embedded.ts";
import { type DeviceKind, openLibrary } from "../native/library.ts";
import { programVersion } from "../system/program-version.ts";

/** Versions of the embedded libraries' parts; a library that does not load on this machine is only named. */
async function libraries(): Promise<string[]> {
	const described = Object.entries(embeddedLibraries).map(async ([kind, locate]) => {
		if ((await locate()) === null) return [];
		// The CUDA library opens the machine's libraries, which `mimo doctor` lists.
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
	return `mimo ${programVersion()}, ABI ${ABI_VERSION}, libraries: ${contents}, Bun ${Bun.version}`;
}
