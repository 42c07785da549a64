/** Opens the device a configuration asks for. */
import { Device } from "./device.ts";
import { embeddedLibraries } from "./embedded.ts";
import { type Library, openLibrary } from "./library.ts";

/** Names the library of a device; "auto": CUDA when this executable has it or MIMO_CUDA_LIBRARY names one, else the CPU's. */
export type DeviceChoice = "auto" | "cpu" | "cuda";

export async function openLibraryOf(device: DeviceChoice): Promise<Library> {
	if (device !== "auto") return await openLibrary(device);
	const cuda = process.env.MIMO_CUDA_LIBRARY !== undefined || (await embeddedLibraries.cuda()) !== null;
	return await openLibrary(cuda ? "cuda" : "cpu");
}

/** `threads`: CPU worker threads, 0 = one a core. */
export async function openDevice(kind: DeviceChoice, threads: number): Promise<Device> {
	return Device.open(await openLibraryOf(kind), { threads });
}
