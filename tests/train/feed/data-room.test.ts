/** Host memory of data threads and buffers: refused where the host lacks it, named where cores do. */
import { afterAll, expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { topologyOf } from "../../../src/parallel/topology.ts";
import { UserError } from "../../../src/system/errors.ts";
import { requireDataRoom } from "../../../src/train/feed/data-room.ts";
import { mimo } from "../../commands/mimo.ts";
import { captions, Scratch } from "../../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const gibibyte = 2 ** 30;

function room(keys: Record<string, unknown>, host: { memory: number; cores: number }, ranks?: number[]): string | null {
	const c = configurationOf({ preset: "nemotron-vlm-tiny", "data-path": "pictures", "llm-offset": 0, ...keys });
	const topology = topologyOf(c);
	return requireDataRoom(c, topology, ranks ?? [...Array(topology.worldSize).keys()], host);
}

const message = (keys: Record<string, unknown>, memory: number): string => {
	try {
		room(keys, { memory, cores: 1000 });
	} catch (error) {
		if (error instanceof UserError) return error.message;
		throw error;
	}
	return "";
};

test("buffers and threads count for every worker of the lanes that ranks of the host read", () => {
	const keys = { "packing-buffer-size": 1e9, "shuffle-buffer-size": 1000 };
	expect(message(keys, 24 * gibibyte)).toBe(
		"The data of this host's ranks need at least 5.6 TiB of memory, for 2 threads and 2 workers that buffer 1000001000 " +
			"samples each; it has 24.0 GiB. num-workers, data-threads, packing-buffer-size and shuffle-buffer-size set them.",
	);
	expect(message({ "num-workers": 5000 }, 24 * gibibyte)).toStartWith(
		"The data of this host's ranks need at least 53.7 GiB of memory, for 5000 threads; it has 24.0 GiB.",
	);
	expect(message({ "num-workers": 5000, "data-threads": 2 }, 24 * gibibyte)).toBe("");
	expect(message({ "packing-buffer-size": 100 }, gibibyte)).toBe("");
	// Two lanes, each read once for the two ranks that share it; on a host with one of them half.
	const lanes = { "encoder-tp": 2, "encoder-dp": 2, "llm-tp": 2, "llm-dp": 2, "packing-buffer-size": 4e6 };
	expect(message(lanes, 45 * gibibyte)).toContain("45.8 GiB of memory, for 4 threads and 4 workers");
	expect(room(lanes, { memory: 45 * gibibyte, cores: 8 }, [0, 1])).toBeNull();
});

test("more threads than cores can serve are a warning", () => {
	const host = { memory: 24 * gibibyte, cores: 2 };
	expect(room({}, host)).toBeNull();
	expect(room({ "num-workers": 200 }, host)).toBe(
		"num-workers 200: this host's ranks start 200 data threads for 2 cores, which take 2.1 GiB of memory; with " +
			"data-threads fewer threads run the same workers.",
	);
	expect(room({ "num-workers": 200, "data-threads": 4 }, host)).toBeNull();
	expect(room({ "num-workers": 200, "data-path": null }, host)).toBeNull();
});

test("a training is refused before anything is read", () => {
	const folder = captions(scratch, "pictures", [4, 4]);
	const flags = [
		"--preset",
		"nemotron-vlm-tiny",
		"--data-path",
		folder,
		"--packing-buffer-size",
		"1e9",
		"--llm-offset",
		"0",
	];
	const { exitCode, stderr } = mimo(["train", ...flags, "--device", "cpu"], scratch.path);
	expect(exitCode).toBe(2);
	expect(stderr).toMatch(/^mimo: The data of this host's ranks need at least \d+\.\d TiB of memory, for 2 threads/);
});
