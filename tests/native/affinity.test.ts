import { expect, test } from "bun:test";
import { join } from "node:path";
import { allowedCpus, formatCpuList, parseCpuList, type ReadSystem, shareOf } from "../../src/native/affinity.ts";

/** A host with two NUMA nodes of `half` cores, two threads a core as Linux numbers them, and eight GPUs, four a node. */
function host(half: number): ReadSystem {
	const cores = 2 * half;
	const lists = [0, 1].map(
		(node) => `${node * half}-${(node + 1) * half - 1},${cores + node * half}-${cores + (node + 1) * half - 1}\n`,
	);
	return (path) => {
		const [, node] = /^\/sys\/devices\/system\/node\/node(\d)\/cpulist$/.exec(path) ?? [];
		if (node !== undefined) return lists[Number(node)]!;
		const [, cpu] = /^\/sys\/devices\/system\/cpu\/cpu(\d+)\/topology\/thread_siblings_list$/.exec(path) ?? [];
		if (cpu !== undefined) return `${Number(cpu) % cores},${(Number(cpu) % cores) + cores}\n`;
		const [, gpu] = /^\/sys\/bus\/pci\/devices\/gpu(\d)\/local_cpulist$/.exec(path) ?? [];
		if (gpu !== undefined) return lists[Number(gpu) < 4 ? 0 : 1]!;
		return path === "/sys/devices/system/node/online" ? "0-1\n" : "";
	};
}

const read = host(32);
const all = parseCpuList("0-127");
const gpus = Array.from({ length: 8 }, (_, index) => `gpu${index}`);
const base = { allowed: all, localSize: 8, threads: 1, bound: false, gpus };
const cpusOf = (request: Partial<Parameters<typeof shareOf>[0]>, localRank: number, from = read) => {
	const share = shareOf({ ...base, ...request, localRank }, from);
	return share && { cpus: formatCpuList(share.cpus), data: share.data && formatCpuList(share.data) };
};

test("lists of CPUs are read and written as the kernel does", () => {
	expect(parseCpuList("0-3,8,10-11\n")).toEqual([0, 1, 2, 3, 8, 10, 11]);
	expect(parseCpuList("\n")).toEqual([]);
	expect(formatCpuList([8, 0, 1, 10, 11, 2, 3])).toBe("0-3,8,10-11");
});

test("ranks with GPUs get whole cores of the GPU's node, apart from each other; data threads leave one core", () => {
	expect(cpusOf({}, 0)).toEqual({ cpus: "0-7,64-71", data: "1-7,65-71" });
	expect(cpusOf({}, 3)!.cpus).toBe("24-31,88-95");
	expect(cpusOf({}, 4)!.cpus).toBe("32-39,96-103");
	const used = gpus.flatMap((_, rank) => shareOf({ ...base, localRank: rank }, read)!.cpus);
	expect(used.toSorted((a, b) => a - b)).toEqual(all);
});

test("only CPUs that the process may use are shared out", () => {
	const allowed = parseCpuList("0-15,64-79");
	expect(cpusOf({ allowed }, 1)).toEqual({ cpus: "2-3,66-67", data: "3,67" });
	// The GPU's node has none of them: the rank shares all that there are with those alike.
	expect(cpusOf({ allowed }, 5)!.cpus).toBe("10-11,74-75");
});

test("without GPUs the host's cores are divided, and data threads get what computing leaves", () => {
	expect(cpusOf({ gpus: null, localSize: 4, threads: 20 }, 0)).toEqual({ cpus: "0-15,64-79", data: "10-15,74-79" });
	expect(cpusOf({ gpus: null, localSize: 4, threads: 32 }, 3)).toEqual({ cpus: "48-63,112-127", data: null });
	expect(cpusOf({ gpus: null, localSize: 3 }, 1)!.cpus).toBe("21-41,85-105");
});

test("a rank is left alone where CPUs are few, where it is alone, and where a batch system has bound it", () => {
	expect(cpusOf({ gpus: null, localSize: 4, threads: 33 }, 0)).toBeNull();
	expect(cpusOf({ gpus: null, localSize: 1 }, 0)).toBeNull();
	expect(cpusOf({ gpus: null, localSize: 2, bound: true }, 0)).toBeNull();
	expect(cpusOf({ gpus: null, allowed: [0, 1], localSize: 2 }, 0)).toBeNull();
	expect(cpusOf({ allowed: parseCpuList("0-7") }, 0)).toBeNull();
	// Bound to a part of the host: what of it is near the GPU is the rank's alone.
	expect(cpusOf({ allowed: parseCpuList("24-39"), bound: true, localSize: 2, gpus: ["gpu0", null] }, 0)!.cpus).toBe(
		"24-31",
	);
});

test("threads that start later, those of the native library too, run where the process was bound, with equal results", () => {
	const [cpu] = allowedCpus();
	const run = (pinned: boolean) => {
		const { stdout, exitCode } = Bun.spawnSync(
			[process.execPath, join(import.meta.dir, "pinned-program.ts"), pinned ? String(cpu) : ""],
			{
				stderr: "inherit",
			},
		);
		expect(exitCode).toBe(0);
		return JSON.parse(stdout.toString()) as {
			readonly main: string;
			readonly added: readonly string[];
			readonly sum: string;
		};
	};
	const [bound, free] = [run(true), run(false)];
	expect(bound.main).toBe(String(cpu));
	expect(bound.added.length).toBeGreaterThan(0);
	expect(new Set(bound.added)).toEqual(new Set([String(cpu)]));
	expect(free.main).toBe(formatCpuList(allowedCpus()));
	expect(bound.sum).toBe(free.sum);
});
