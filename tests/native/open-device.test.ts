/** The GPU that a rank takes, and the error where ranks outnumber GPUs: arithmetic, for which no GPU is needed. */
import { expect, test } from "bun:test";
import { gpuOf, requireGpus } from "../../src/native/open-device.ts";
import { UserError } from "../../src/system/errors.ts";

const ranks = Array.from({ length: 4 }, (_, localRank) => ({ localRank, localSize: 4 }));

test("nccl gives each rank a GPU of its own", () => {
	expect(ranks.map((rank) => gpuOf(8, rank))).toEqual([0, 1, 2, 3]);
	expect(ranks.map((rank) => gpuOf(4, { ...rank, backend: "nccl" }))).toEqual([0, 1, 2, 3]);
	// A batch system shows each rank its own alone.
	expect(ranks.map((rank) => gpuOf(1, rank))).toEqual([0, 0, 0, 0]);
	expect(gpuOf(4, {})).toBe(0);
});

test("shm deals GPUs out in turn", () => {
	for (const [gpus, wanted] of [
		[1, [0, 0, 0, 0]],
		[2, [0, 1, 0, 1]],
		[3, [0, 1, 2, 0]],
		[8, [0, 1, 2, 3]],
	] as const) {
		expect(ranks.map((rank) => gpuOf(gpus, { ...rank, backend: "shm" }))).toEqual([...wanted]);
	}
});

test("too few GPUs are refused with the setting that shares them", () => {
	const sentence = (gpus: string) =>
		`4 ranks and ${gpus} on this host: NCCL needs a GPU for each rank; with --distributed-backend shm ranks share GPUs (slow: for checking a layout).`;
	expect(() => requireGpus(1, 4)).toThrow(new UserError(sentence("1 GPU")));
	expect(() => requireGpus(2, 4)).toThrow(new UserError(sentence("2 GPUs")));
	expect(() => gpuOf(2, ranks[0]!)).toThrow(new UserError(sentence("2 GPUs")));
	expect(() => requireGpus(4, 4)).not.toThrow();
});
