/** Findings of `mimo doctor` about one machine: processor, memory, limits, disk, native libraries, devices. */
import { accessSync, constants, existsSync, readFileSync, statfsSync, statSync } from "node:fs";
import { availableParallelism, freemem, totalmem } from "node:os";
import { dirname, resolve } from "node:path";
import { ABI_VERSION } from "../native/abi.ts";
import { allowedCpus, formatCpuList, gpuAddresses, LEAST_SHARE, numaNodes, shareOf } from "../native/affinity.ts";
import { Device } from "../native/device.ts";
import { type DeviceKind, embeddedLibraries, openLibrary } from "../native/library.ts";
import { deviceCount, visibleGpus } from "../native/open-device.ts";
import { counted } from "../system/counted.ts";
import { programVersion } from "../system/program-version.ts";

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

/** How ranks will be bound to CPUs (cpu-affinity auto). */
async function affinity(): Promise<Finding> {
	const name = "cpu affinity";
	const allowed = allowedCpus();
	const nodes = numaNodes();
	const gpus = await visibleGpus("auto");
	const addresses = gpuAddresses(Array.from({ length: gpus }, (_, index) => index));
	const ranks = Math.max(2, gpus);
	const shares = addresses.map((_, localRank) =>
		shareOf({
			allowed,
			localRank,
			localSize: ranks,
			threads: 1,
			bound: false,
			gpus: gpus > 1 ? addresses : [...addresses, null],
		}),
	);
	const details = { allowed: formatCpuList(allowed), nodes, gpus: addresses, shares };
	const where = `${counted(allowed.length, "CPU")} of ${counted(Math.max(1, nodes.length), "NUMA node")}`;
	if (shares.some((share) => share !== null)) {
		const each = shares.map((share, gpu) => `GPU ${gpu}: ${share === null ? "any" : formatCpuList(share.cpus)}`);
		return { name, value: `${where}; ranks run on ${each.join(", ")}`, state: "information", details };
	}
	const most = Math.floor(allowed.length / LEAST_SHARE);
	const value = most < 2 ? "too few to bind ranks to" : `up to ${most} ranks run on cores of their own`;
	return { name, value: `${where}, ${value}`, state: "information", details };
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
		await affinity(),
		memory(),
		sharedMemory(),
		openFiles(),
		disk(folder),
		...inspectAccelerators(),
		...(await library("cpu")),
		...(await library("cuda")),
	];
}

// Findings about a host's GPUs, from nvidia-smi.

const queries = [
	"index",
	"name",
	"driver_version",
	"memory.total",
	"memory.used",
	"clocks.sm",
	"clocks.max.sm",
	"clocks_throttle_reasons.active",
	"ecc.errors.uncorrected.volatile.total",
] as const;

/** Bits of clocks_throttle_reasons.active that are faults; the others, such as idle, are not. */
const throttled = { "hardware slowdown": 0x8, "software thermal slowdown": 0x20, heat: 0x40, "power brake": 0x80 };

/** Output of `nvidia-smi`; null where it is absent or fails. */
export type DriverTool = (args: readonly string[]) => string | null;

const nvidiaSmi: DriverTool = (args) => {
	if (!Bun.which("nvidia-smi")) return null;
	const { stdout, success } = Bun.spawnSync(["nvidia-smi", ...args], {
		stdout: "pipe",
		stderr: "ignore",
		timeout: 20_000,
	});
	return success ? stdout.toString() : null;
};

/** A finding for the driver, one for all GPUs, and one for each problem. */
export function inspectAccelerators(tool: DriverTool = nvidiaSmi): Finding[] {
	const table = tool([`--query-gpu=${queries.join(",")}`, "--format=csv,noheader,nounits"]);
	if (table === null) return [{ name: "GPUs", value: "none: the NVIDIA driver does not answer", state: "information" }];
	const gpus = table
		.trim()
		.split("\n")
		.map((line) => line.split(",").map((cell) => cell.trim()));
	const names = new Map<string, number>();
	for (const [, name] of gpus) names.set(name!, (names.get(name!) ?? 0) + 1);
	const kinds = [...names].map(([name, count]) => `${count} × ${name}`).join(", ");
	const findings: Finding[] = [
		{ name: "driver", value: `NVIDIA ${gpus[0]?.[2]}`, state: "good" },
		{
			name: "GPUs",
			value: kinds,
			state: names.size === 1 ? "good" : "warning",
			...(names.size === 1 ? {} : { advice: "every step waits for the slowest GPU" }),
			details: { gpus: gpus.map((cells) => Object.fromEntries(queries.map((query, i) => [query, cells[i]]))) },
		},
	];
	for (const [index, , , , used, clock, fastest, reasons, errors] of gpus) {
		const bits = Number(reasons);
		const active = Object.entries(throttled).flatMap(([reason, bit]) => ((bits & bit) === 0 ? [] : [reason]));
		if (active.length > 0) {
			const value = `throttled (${active.join(", ")}): ${clock} of ${fastest} MHz`;
			findings.push({ name: `GPU ${index}`, value, state: "warning", advice: "check cooling and power" });
		}
		if (Number(errors) > 0) {
			const value = counted(Number(errors), "uncorrected memory error");
			findings.push({ name: `GPU ${index}`, value, state: "problem", advice: "reset or replace it" });
		}
		if (Number(used) > 1024) {
			const value = `${used} MiB are in use`;
			findings.push({ name: `GPU ${index}`, value, state: "warning", advice: "another program runs on it" });
		}
	}
	return gpus.length > 1 ? [...findings, peerAccess(tool, gpus.length)] : findings;
}

/** Whether every GPU can read every other's memory. */
function peerAccess(tool: DriverTool, count: number): Finding {
	const matrix = tool(["topo", "-p2p", "r"]);
	if (matrix === null) return { name: "peer access", value: "unknown", state: "information" };
	const rows = matrix.split("\n").filter((line) => /^\s*GPU\d+\s+(X|[A-Z]+)/.test(line) && !/GPU0\s+GPU1/.test(line));
	const missing = rows.flatMap((line, from) =>
		line
			.trim()
			.split(/\s+/)
			.slice(1, count + 1)
			.flatMap((cell, to) => (cell === "OK" || cell === "X" ? [] : [`${from}→${to} ${cell}`])),
	);
	if (missing.length === 0) return { name: "peer access", value: `between all ${count} GPUs`, state: "good" };
	return {
		name: "peer access",
		value: `not between ${missing.slice(0, 4).join(", ")}${missing.length > 4 ? " …" : ""}`,
		state: "warning",
		advice: "collectives inside this host go through its memory",
	};
}
