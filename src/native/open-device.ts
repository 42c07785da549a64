/** Opens the device a configuration asks for. */
import { check, Device } from "./device.ts";
import { embeddedLibraries } from "./embedded.ts";
import { type Library, openLibrary } from "./library.ts";

/** Names the library of a device; "auto": CUDA when its library is there and sees a GPU, else the CPU's. */
export type DeviceChoice = "auto" | "cpu" | "cuda";

export async function openLibraryOf(device: DeviceChoice): Promise<Library> {
	if (device !== "auto") return await openLibrary(device);
	if (process.env.MIMO_CUDA_LIBRARY || (await embeddedLibraries.cuda()) !== null) {
		const library = await openLibrary("cuda");
		if (deviceCount(library) > 0) return library;
	}
	return await openLibrary("cpu");
}

/** Devices that a library could open. */
export function deviceCount(library: Library): number {
	const out = new Int32Array(1);
	check(library, "mimo_device_count", out);
	return out[0]!;
}

export interface DeviceOptions {
	/** CPU worker threads, 0 = one a core. */
	readonly threads: number;
	/** This rank's place on its host: which GPU it takes, unless it sees only one. */
	readonly localRank?: number;
	/** Results repeat bit for bit, whatever it costs. */
	readonly deterministic?: boolean;
}

export async function openDevice(kind: DeviceChoice, options: DeviceOptions): Promise<Device> {
	const library = await openLibraryOf(kind);
	const index = library.kind === "cuda" && deviceCount(library) > 1 ? (options.localRank ?? 0) : 0;
	const device = Device.open(library, { index, threads: options.threads });
	if (options.deterministic) device.setDeterministic(true);
	return device;
}
