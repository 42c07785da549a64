/** Findings of `mimo doctor` about one machine: processor, memory, limits, disk, native libraries, devices. */
import { accessSync, constants, existsSync, readFileSync, statfsSync, statSync } from "node:fs";
import { availableParallelism, freemem, totalmem } from "node:os";
import { dirname, resolve } from "node:path";
import { ABI_VERSION } from "../native/abi.ts";
import { Device } from "../native/device.ts";
import { embeddedLibraries } from "../native/embedded.ts";
import { type DeviceKind, openLibrary } from "../native/library.ts";
import { deviceCount } from "../native/open-device.ts";
import { counted } from "../system/counted.ts";
import { programVersion } from "../system/program-version.ts";
import { inspectAccelerators } from "./accelerators.ts";

export interface Finding {
	readonly name: string;
	/** The finding as text. */
	readonly value: string;
	/** "problem": training cannot run. */
	readonly state: "good" | "information" | "warning" | "problem";
	/** Meaning of the value, or advice about it. */
	readonly advice?: string;
	/** The numbers behind `value`. */
	readonly details?: Readonly<Record<string, unknown>>;
}

function read(file: string): string {
	try {
		return readFileSync(file, "utf8");
	} catch {
		return "";
	}
}

/** "7.5 GiB". */
function gibibytes(bytes: number): string {
	return `${(bytes / 2 ** 30).toFixed(1)} GiB`;
}

function processor(): Finding {
	const information = read("/proc/cpuinfo");
	const model = /^model name\s*:\s*(.+)$/m.exec(information)?.[1] ?? process.arch;
	const flags = new Set(/^flags\s*:\s*(.+)$/m.exec(information)?.[1]?.split(" ") ?? []);
	const instructions = ["avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"].filter((flag) => flags.has(flag));
	const value = `${model} (${instructions.join(", ") || "no AVX"})`;
	const details = { model, instructions };
	if (flags.has("avx2") && flags.has("fma")) return { name: "processor", value, state: "good", details };
	return { name: "processor", value, state: "problem", advice: "the CPU library needs AVX2 and FMA", details };
}

function cores(): Finding {
	const online = read("/proc/cpuinfo").match(/^processor\s*:/gm)?.length ?? 0;
	const usable = availableParallelism();
	const [quota, period] = read("/sys/fs/cgroup/cpu.max").split(/\s/).map(Number);
	const allowed = quota && period ? quota / period : null;
	const limit = allowed === null ? "" : `, ${allowed} by the control group`;
	const details = { usable, online, controlGroupLimit: allowed };
	return { name: "cores", value: `${usable} usable of ${online}${limit}`, state: "information", details };
}

function memory(): Finding {
	const total = totalmem();
	const available = Number(/^MemAvailable:\s+(\d+) kB/m.exec(read("/proc/meminfo"))?.[1] ?? 0) * 1024 || freemem();
	const controlGroupLimit = Number(read("/sys/fs/cgroup/memory.max")) || null;
	const limit = controlGroupLimit === null ? "" : `, ${gibibytes(controlGroupLimit)} by the control group`;
	const value = `${gibibytes(available)} available of ${gibibytes(total)}${limit}`;
	return { name: "memory", value, state: "information", details: { total, available, controlGroupLimit } };
}

/** Ranks of one host talk through shared memory. */
function sharedMemory(): Finding {
	const name = "/dev/shm";
	try {
		const { bsize, blocks, bavail } = statfsSync(name);
		const details = { total: bsize * blocks, available: bsize * bavail };
		const value = `${gibibytes(details.available)} available of ${gibibytes(details.total)}`;
		if (details.available >= 2 ** 28) return { name, value, state: "good", details };
		return { name, value, state: "warning", advice: "several ranks on this host need more", details };
	} catch {
		return { name, value: "absent", state: "warning", advice: "several ranks on this host need it" };
	}
}

function openFiles(): Finding {
	const [, soft, hard] = /^Max open files\s+(\S+)\s+(\S+)/m.exec(read("/proc/self/limits")) ?? [];
	const details = { soft: soft ?? null, hard: hard ?? null };
	const value = `${soft ?? "unknown"}, at most ${hard ?? "unknown"}`;
	if (soft === undefined || soft === "unlimited" || Number(soft) >= 1024) {
		return { name: "open files", value, state: "good", details };
	}
	return { name: "open files", value, state: "warning", advice: "raise it with ulimit -n 1024", details };
}

/** Whether a native library loads, and the libraries and device that it opens. */
async function library(kind: DeviceKind): Promise<Finding[]> {
	const name = `${kind} library`;
	const override = process.env[`MIMO_${kind.toUpperCase()}_LIBRARY`];
	if (kind === "cuda" && !override && (await embeddedLibraries.cuda()) === null) {
		return [{ name, value: "not in this executable", state: "information" }];
	}
	const failed = kind === "cpu" ? "problem" : "warning";
	try {
		const opened = await openLibrary(kind);
		const { source } = opened;
		if (kind === "cuda" && deviceCount(opened) === 0) {
			const value = `${source}, ABI ${ABI_VERSION}; no GPU that CUDA 13 can use (driver 580 or later)`;
			return [{ name, value, state: "information", details: { source, abi: ABI_VERSION } }];
		}
		const [versions, ...vendors] = opened.versions.split(/; (?=cuBLASLt|cuDNN|NCCL)/) as [string, ...string[]];
		const loaded: Finding = {
			name,
			value: `${source}, ABI ${ABI_VERSION}, ${versions}`,
			state: "good",
			details: { source, abi: ABI_VERSION, versions: opened.versions },
		};
		const opens = vendors.map(vendorLibrary);
		try {
			using device = Device.open(opened);
			const about = device.describe();
			const parts = [about.name, about.instructions, counted(about.threads, "thread"), gibibytes(about.memoryBytes)];
			const value = parts.filter((part) => part !== "").join(", ");
			return [loaded, ...opens, { name: `${kind} device`, value, state: "good", details: { ...about } }];
		} catch (error) {
			return [
				loaded,
				...opens,
				{ name: `${kind} device`, value: "cannot be opened", state: failed, advice: String((error as Error).message) },
			];
		}
	} catch (error) {
		return [{ name, value: "does not load", state: failed, advice: (error as Error).message }];
	}
}

/** Free space for checkpoints, which a run otherwise finds lacking when it writes its first. */
function disk(folder: string): Finding {
	const name = "disk";
	const path = resolve(folder);
	let at = path;
	while (!existsSync(at)) at = dirname(at);
	const absent = at === path ? "" : ", which does not exist yet";
	if (!statSync(at).isDirectory()) return { name, value: folder, state: "problem", advice: `${at} is not a folder` };
	try {
		const { bsize, blocks, bavail } = statfsSync(at);
		const details = { folder, total: bsize * blocks, available: bsize * bavail };
		const value = `${gibibytes(details.available)} free of ${gibibytes(details.total)} for ${folder}${absent}`;
		try {
			accessSync(at, constants.W_OK);
		} catch {
			return { name, value, state: "problem", advice: `${at} may not be written`, details };
		}
		if (details.available >= leastDisk) return { name, value, state: "good", details };
		return { name, value, state: "warning", advice: "a checkpoint may not fit", details };
	} catch (error) {
		return { name, value: folder, state: "problem", advice: (error as Error).message };
	}
}

/** Free bytes below which a warning is given. */
const leastDisk = 10 * 2 ** 30;

/** "cuDNN 9.19.0 (/path/libcudnn.so.9)", or the sentence that says what to install. */
function vendorLibrary(text: string): Finding {
	const name = text.slice(0, text.indexOf(" "));
	const found = /^\S+ ([\d.]+) \((.*)\)$/.exec(text);
	if (found === null) return { name, value: "absent", state: "warning", advice: text };
	return { name, value: `${found[1]}, ${found[2]}`, state: "good", details: { version: found[1], file: found[2] } };
}

/** All findings about this machine, in the order of the output. `folder`: where checkpoints will go. */
export async function inspectMachine(folder: string): Promise<Finding[]> {
	return [
		{ name: "mimo", value: programVersion(), state: "information" },
		processor(),
		cores(),
		memory(),
		sharedMemory(),
		openFiles(),
		disk(folder),
		...inspectAccelerators(),
		...(await library("cpu")),
		...(await library("cuda")),
	];
}
