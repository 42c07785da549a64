/** Opens the device a configuration asks for. */
import { counted } from "../system/counted.ts";
import { debug } from "../system/debug.ts";
import { NativeError, UserError } from "../system/errors.ts";
import type { BackendName } from "./abi.ts";
import { formatCpuList, gpuAddresses, pinRank } from "./affinity.ts";
import { check, Device } from "./device.ts";
import { embeddedLibraries, type Library, openLibrary } from "./library.ts";

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

/** GPUs that the device's library sees; 0 where the library cannot be loaded, which is reported when a device is opened. */
export async function visibleGpus(device: DeviceChoice): Promise<number> {
	try {
		const library = await openLibraryOf(device);
		return library.kind === "cuda" ? deviceCount(library) : 0;
	} catch (error) {
		if (error instanceof UserError || error instanceof NativeError) return 0;
		throw error;
	}
}

export interface DeviceOptions {
	/** CPU worker threads, 0 = one a core. */
	readonly threads: number;
	/** This rank's place among those of its host: which GPU it takes, unless it sees only one. */
	readonly localRank?: number;
	readonly localSize?: number;
	/** How ranks talk; nccl unless given. */
	readonly backend?: BackendName;
	/** Results repeat bit for bit, whatever it costs. */
	readonly deterministic?: boolean;
	/** Runs of operations that repeat are launched as CUDA graphs. */
	readonly graphs?: boolean;
	/** Whether the calling thread, and those that it starts, may be bound to CPUs (affinity.ts). */
	readonly pin?: boolean;
}

/**
 * Chooses the GPU of the host that a rank takes. Under shm ranks go round; under nccl each has its own, unless it sees
 * one GPU alone: the native library then finds out whether that is another rank's too. Throws a UserError where GPUs
 * are too few.
 */
export function gpuOf(gpus: number, options: Pick<DeviceOptions, "localRank" | "localSize" | "backend">): number {
	const { localRank = 0, localSize = 1, backend = "nccl" } = options;
	if (backend === "shm") return localRank % gpus;
	if (gpus === 1) return 0;
	requireGpus(gpus, localSize);
	return localRank;
}

/** Throws a UserError where `ranks` of one host that NCCL joins, which all see the same GPUs, outnumber these. */
export function requireGpus(gpus: number, ranks: number): void {
	if (ranks <= gpus) return;
	throw new UserError(
		`${counted(ranks, "rank")} and ${counted(gpus, "GPU")} on this host: NCCL needs a GPU for each rank; with --distributed-backend shm ranks share GPUs (slow: for checking a layout).`,
	);
}

export async function openDevice(kind: DeviceChoice, options: DeviceOptions): Promise<Device> {
	const library = await openLibraryOf(kind);
	const gpus = library.kind === "cuda" ? deviceCount(library) : 0;
	const index = gpus > 0 ? gpuOf(gpus, options) : 0;
	if (options.pin) {
		const { localRank = 0, localSize = 1, threads } = options;
		const known = Array.from({ length: localSize }, (_, rank) => rank === localRank || gpus > 1);
		const indexOf = (rank: number) => (known[rank] ? gpuOf(gpus, { ...options, localRank: rank }) : -1);
		const addresses = () => gpuAddresses(known.map((_, rank) => indexOf(rank)));
		const near = gpus > 0 ? { threads: 1, gpus: addresses() } : { threads, gpus: null };
		const cpus = pinRank({ localRank, localSize, ...near });
		if (cpus !== null) debug(1, `pinned to the CPUs ${formatCpuList(cpus)}`);
	}
	const device = Device.open(library, { index, threads: options.threads });
	debug(1, `device ${index} is open`);
	if (options.deterministic) device.setDeterministic(true);
	if (options.graphs) device.setGraphs(true);
	return device;
}
