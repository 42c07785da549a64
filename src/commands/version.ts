/** `mimo --version`: version, commit, ABI version, the native libraries inside the executable and Bun, one line. */
import { ABI_VERSION } from "../native/abi.ts";
import { type DeviceKind, embeddedLibraries, openLibrary } from "../native/library.ts";
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

export async function versions() {
	return { mimo: programVersion(), abi: ABI_VERSION, libraries: await libraries(), bun: Bun.version };
}

export async function versionLine(): Promise<string> {
	const { mimo, abi, libraries: embedded, bun } = await versions();
	return `mimo ${mimo}, ABI ${abi}, libraries: ${embedded.join(", ") || "none"}, Bun ${bun}`;
}
