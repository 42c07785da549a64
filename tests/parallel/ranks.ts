/**
 * Runs rank programs of this folder in processes of one run, as a launcher starts them, and waits for all of them. The processes
 * (rank-process.ts) stay for the next run of the test file: to start, load and compile the program takes longer than most of
 * the runs.
 */
import { resolve } from "node:path";
import type { BackendName } from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import { deviceCount, gpuOf } from "../../src/native/open-device.ts";
import { Run } from "../../src/native/run.ts";
import { testLibrary } from "../support.ts";
import { RankProcess } from "./rank-process.ts";

export interface RankOutcome {
	readonly rank: number;
	readonly exitCode: number | null;
	readonly signal: string | number | null;
	readonly stdout: string;
	readonly stderr: string;
}

/** How the GPUs of rank programs talk: MIMO_TEST_BACKEND, or nccl. */
const testBackend: BackendName = process.env.MIMO_TEST_BACKEND === "shm" ? "shm" : "nccl";

/** Idle processes. */
const idle: RankProcess[] = [];

/** Runs `program ...args` (a path, or a name of this folder) on `ranks` processes. Each finds its place with placeOfRank(). */
export async function runRanks(program: string, ranks: number, args: readonly string[] = []): Promise<RankOutcome[]> {
	using run = Run.create(await testLibrary(), { ranks, supervised: true, timeoutMinutes: 1 });
	const path = resolve(import.meta.dir, program);
	return await Promise.all(
		Array.from({ length: ranks }, async (_, rank) => {
			const process = idle.shift() ?? new RankProcess();
			const env = { TEST_RUN: run.path, TEST_RANK: String(rank), TEST_RANKS: String(ranks) };
			const outcome = await process.run({ program: path, args, env });
			// A rank that fails must not leave the others waiting, and its shared memory must not reach another run.
			if (outcome.exitCode !== 0) {
				run.fail(rank, `it ended with ${outcome.signal ?? outcome.exitCode}`);
				process.end();
			} else idle.push(process);
			return { rank, ...outcome };
		}),
	);
}

/** For rank programs: the run, which the rank leaves in the end, this process's rank, and how GPUs talk. */
export async function placeOfRank() {
	const ranks = Number(process.env.TEST_RANKS);
	const run = Run.open(await testLibrary(), process.env.TEST_RUN!, ranks);
	return {
		...{ run, rank: Number(process.env.TEST_RANK), ranks, backend: testBackend },
		[Symbol.dispose]() {
			run.leave();
			run[Symbol.dispose]();
		},
	};
}

/** For rank programs: this rank's device, on CUDA a GPU of its own, or of several where they talk through shm. */
export async function deviceOfRank(): Promise<Device> {
	const library = await testLibrary();
	const place = { localRank: Number(process.env.TEST_RANK), localSize: Number(process.env.TEST_RANKS) };
	const index = library.kind === "cuda" ? gpuOf(deviceCount(library), { ...place, backend: testBackend }) : 0;
	return Device.open(library, { index, threads: 1 });
}
