/** Starts rank programs of this folder as processes of one run, as a launcher does, and waits for all of them. */
import { resolve } from "node:path";
import type { BackendName } from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import { deviceCount, gpuOf } from "../../src/native/open-device.ts";
import { Run } from "../../src/native/run.ts";
import { testLibrary } from "../support.ts";

export interface RankOutcome {
	readonly rank: number;
	readonly exitCode: number | null;
	readonly signal: string | number | null;
	readonly stdout: string;
	readonly stderr: string;
}

/** How the GPUs of rank programs talk: MIMO_TEST_BACKEND, or nccl. */
const testBackend: BackendName = process.env.MIMO_TEST_BACKEND === "shm" ? "shm" : "nccl";

/** Runs `program ...args` (a path, or a name of this folder) on `ranks` processes. Each finds its place with placeOfRank(). */
export async function runRanks(program: string, ranks: number, args: readonly string[] = []): Promise<RankOutcome[]> {
	using run = Run.create(await testLibrary(), { ranks, supervised: true, timeoutMinutes: 1 });
	const children = Array.from({ length: ranks }, (_, rank) =>
		Bun.spawn([process.execPath, resolve(import.meta.dir, program), ...args], {
			env: { ...process.env, TEST_RUN: run.path, TEST_RANK: String(rank), TEST_RANKS: String(ranks) },
			stdout: "pipe",
			stderr: "pipe",
		}),
	);
	return await Promise.all(
		children.map(async (child, rank) => {
			const ended = child.exited.then((code) => {
				// A rank that fails must not leave the others waiting.
				if (code !== 0) run.fail(rank, `it ended with ${child.signalCode ?? code}`);
			});
			const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text(), ended]);
			return { rank, exitCode: child.exitCode, signal: child.signalCode, stdout, stderr };
		}),
	);
}

/** For rank programs: the run, this process's rank, and how GPUs talk. */
export async function placeOfRank() {
	const ranks = Number(process.env.TEST_RANKS);
	const run = Run.open(await testLibrary(), process.env.TEST_RUN!, ranks);
	return { run, rank: Number(process.env.TEST_RANK), ranks, backend: testBackend };
}

/** For rank programs: this rank's device, on CUDA a GPU of its own, or of several where they talk through shm. */
export async function deviceOfRank(): Promise<Device> {
	const library = await testLibrary();
	const place = { localRank: Number(process.env.TEST_RANK), localSize: Number(process.env.TEST_RANKS) };
	const index = library.kind === "cuda" ? gpuOf(deviceCount(library), { ...place, backend: testBackend }) : 0;
	return Device.open(library, { index, threads: 1 });
}
