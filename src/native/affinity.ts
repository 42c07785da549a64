/**
 * Which CPUs a rank's threads run on: whole cores near its GPU, or a share of the host's, apart from those of the host's other
 * ranks; memory follows the threads that touch it first. Data threads leave the first cores of the share to computing. A batch
 * system's own binding is kept, and hosts with few CPUs are left alone.
 */
import { dlopen, FFIType } from "bun:ffi";
import { readFileSync } from "node:fs";

/** Fewest CPUs of a share: a rank has a dozen threads that seldom run, beside those that compute. */
export const LEAST_SHARE = 4;
/** Bytes of a mask of CPUs: room for 8192. */
const MASK_BYTES = 1024;

/** "0-3,8" → 0 1 2 3 8. */
export function parseCpuList(text: string): number[] {
	return text
		.trim()
		.split(",")
		.flatMap((part) => {
			const [, first, last = first] = /^(\d+)(?:-(\d+))?$/.exec(part) ?? [];
			if (first === undefined) return [];
			return Array.from({ length: Number(last) - Number(first) + 1 }, (_, at) => Number(first) + at);
		});
}

/** 0 1 2 3 8 → "0-3,8". */
export function formatCpuList(cpus: readonly number[]): string {
	const parts: [number, number][] = [];
	for (const cpu of cpus.toSorted((a, b) => a - b)) {
		const last = parts.at(-1);
		if (last?.[1] === cpu - 1) last[1] = cpu;
		else parts.push([cpu, cpu]);
	}
	return parts.map(([first, last]) => (first === last ? String(first) : `${first}-${last}`)).join(",");
}

/** Text of the kernel's files about the machine; "" for a file that is not there. */
export type ReadSystem = (path: string) => string;

const readSystem: ReadSystem = (path) => {
	try {
		return readFileSync(path, "utf8");
	} catch {
		return "";
	}
};

/** CPUs by core, cores of a NUMA node side by side. */
function coresOf(cpus: readonly number[], read: ReadSystem): number[][] {
	const nodes = new Map(numaNodes(read).flatMap(({ node, cpus }) => cpus.map((cpu) => [cpu, node] as const)));
	const siblings = (cpu: number) =>
		parseCpuList(read(`/sys/devices/system/cpu/cpu${cpu}/topology/thread_siblings_list`))[0] ?? cpu;
	const cores = [...Map.groupBy(cpus, siblings)].map(([first, threads]) => ({ first, threads }));
	const nodeOf = (first: number) => nodes.get(first) ?? 0;
	cores.sort((a, b) => nodeOf(a.first) - nodeOf(b.first) || a.first - b.first);
	return cores.map(({ threads }) => threads);
}

export interface ShareRequest {
	/** CPUs that this process may use. */
	readonly allowed: readonly number[];
	readonly localRank: number;
	readonly localSize: number;
	/** Threads that compute. */
	readonly threads: number;
	/** Whether a batch system has bound this process to CPUs of its own. */
	readonly bound: boolean;
	/** PCI address of the GPU of each rank of the host, null where this process cannot know; null: no GPUs. */
	readonly gpus: readonly (string | null)[] | null;
}

export interface CpuShare {
	readonly cpus: readonly number[];
	/** Of them, those of data threads; null: all. */
	readonly data: readonly number[] | null;
}

/** The CPUs of a rank; null: it is left alone. */
export function shareOf(request: ShareRequest, read: ReadSystem = readSystem): CpuShare | null {
	const { allowed, localRank, localSize, threads, bound, gpus } = request;
	if (gpus === null && (bound || localSize === 1)) return null;
	const near = (rank: number): readonly number[] => {
		const address = gpus?.[rank] ?? null;
		const list = address === null ? [] : parseCpuList(read(`/sys/bus/pci/devices/${address}/local_cpulist`));
		const some = allowed.filter((cpu) => list.includes(cpu));
		// A machine of one node says nothing, and neither does a virtual one.
		return some.length > 0 ? some : allowed;
	};
	const own = near(localRank);
	const known = (rank: number) => !bound && (gpus === null || gpus[rank] !== null);
	const peers = Array.from({ length: localSize }, (_, rank) => rank).filter(
		(rank) => rank === localRank || (known(rank) && near(rank).join() === own.join()),
	);
	const cores = coresOf(own, read);
	const cut = (at: number) => Math.floor((at * cores.length) / peers.length);
	const at = peers.indexOf(localRank);
	const mine = cores.slice(cut(at), cut(at + 1));
	const cpus = mine.flat();
	if (cpus.length < Math.max(LEAST_SHARE, threads) || cpus.length === allowed.length) return null;
	// The cores that computing threads fill.
	let computing = 0;
	for (let filled = 0; filled < threads; computing++) filled += mine[computing]!.length;
	const data = mine.slice(computing).flat();
	return { cpus, data: data.length > 0 ? data : null };
}

let libc: ReturnType<typeof openLibc> | null = null;

function openLibc() {
	const mask = { args: [FFIType.i32, FFIType.u64, FFIType.ptr], returns: FFIType.i32 } as const;
	return dlopen("libc.so.6", { sched_getaffinity: mask, sched_setaffinity: mask });
}

/** CPUs that the calling thread may use; empty where the kernel does not say. */
export function allowedCpus(): number[] {
	libc ??= openLibc();
	const mask = new Uint8Array(MASK_BYTES);
	if (libc.symbols.sched_getaffinity(0, MASK_BYTES, mask) !== 0) return [];
	return Array.from({ length: 8 * MASK_BYTES }, (_, cpu) => cpu).filter((cpu) => mask[cpu >> 3]! & (1 << (cpu & 7)));
}

/** Lets the calling thread, and those that it starts from now on, run on these CPUs alone; false: the kernel refuses. */
export function runOn(cpus: readonly number[]): boolean {
	libc ??= openLibc();
	const mask = new Uint8Array(MASK_BYTES);
	for (const cpu of cpus) mask[cpu >> 3]! |= 1 << (cpu & 7);
	return libc.symbols.sched_setaffinity(0, MASK_BYTES, mask) === 0;
}

/** PCI addresses, as /sys spells them, of the GPUs that CUDA shows this process, by its index (-1: not known); null where the driver does not say. */
export function gpuAddresses(indices: readonly number[]): (string | null)[] {
	const unknown = indices.map(() => null);
	try {
		const driver = dlopen("libcuda.so.1", {
			cuInit: { args: [FFIType.u32], returns: FFIType.i32 },
			cuDeviceGetPCIBusId: { args: [FFIType.ptr, FFIType.i32, FFIType.i32], returns: FFIType.i32 },
		});
		if (driver.symbols.cuInit(0) !== 0) return unknown;
		return indices.map((index) => {
			if (index < 0) return null;
			const text = Buffer.alloc(32);
			if (driver.symbols.cuDeviceGetPCIBusId(text, text.length, index) !== 0) return null;
			return text.toString("latin1").replace(/\0.*$/s, "").toLowerCase();
		});
	} catch {
		return unknown;
	}
}

/** The process's cores before it was pinned: a restarted rank shares them out again. */
let before: readonly number[] | null = null;
let pinned: CpuShare | null = null;

/** Whether Slurm has bound the tasks of the step to CPUs. */
function boundBySlurm({ SLURM_CPU_BIND_TYPE: type }: Readonly<Record<string, string | undefined>>): boolean {
	return type !== undefined && type !== "" && type !== "none";
}

/** Pins the calling thread, and with it the threads that this process starts later. Returns the CPUs; null: it is left alone. */
export function pinRank(request: Omit<ShareRequest, "allowed" | "bound">): readonly number[] | null {
	before ??= allowedCpus();
	pinned = shareOf({ ...request, allowed: before, bound: boundBySlurm(process.env) });
	if (pinned !== null && !runOn(pinned.cpus)) pinned = null;
	return pinned?.cpus ?? null;
}

/** CPUs of the data threads of this process; null: they run where it runs. */
export function dataCpus(): readonly number[] | null {
	return pinned?.data ?? null;
}

/** NUMA nodes of the machine with their CPUs. */
export function numaNodes(
	read: ReadSystem = readSystem,
): { readonly node: number; readonly cpus: readonly number[] }[] {
	return parseCpuList(read("/sys/devices/system/node/online")).map((node) => ({
		node,
		cpus: parseCpuList(read(`/sys/devices/system/node/node${node}/cpulist`)),
	}));
}
