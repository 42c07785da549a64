/**
 * Rank program of folders.ts: writes Hugging Face folders of FOLDER together with the other ranks, in turns with as many `dd`; rank 0 prints
 * seconds as JSON.
 *
 *   folders-rank.ts FOLDER LAYERS ROUNDS
 */
import { mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { writeHuggingFaceFiles } from "../../src/checkpoint/hf/folder.ts";
import { defaultShardBytes, GatheredTensors, type NamedTensors, shareOf } from "../../src/checkpoint/index.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import type { ShardBlock } from "../../src/parallel/index.ts";
import { World } from "../../src/parallel/world.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { placeOfRank } from "../parallel/ranks.ts";

const [folder, layers, rounds] = [process.argv[2]!, Number(process.argv[3]), Number(process.argv[4])];
/** Of Llama 3.2 1B: rows, columns, and the axis that tensor parallelism cuts. */
const matrices = [
	{ name: "linear_qkv", shape: [3072, 2048], axis: 0 },
	{ name: "linear_proj", shape: [2048, 2048], axis: 1 },
	{ name: "linear_fc1", shape: [16384, 2048], axis: 0 },
	{ name: "linear_fc2", shape: [2048, 8192], axis: 1 },
] as const;

using place = await placeOfRank();
using device = Device.open(await openLibrary("cpu"), { threads: 1 });
using world = World.join(device, place.run, place.rank, place.backend);
const group = await world.group("model", [...Array(world.size).keys()]);

/** A rank's part of a matrix of which `axis` is cut; null: it holds all of it. */
function partOf(
	[rows, columns]: readonly [number, number],
	axis: 0 | 1 | null,
): { shape: number[]; block: ShardBlock } {
	const [own, wide] = [axis === 0 ? rows / world.size : rows, axis === 1 ? columns / world.size : columns];
	const block = { localRow: 0, localColumn: 0, rows: own, columns: wide };
	const [fullRow, fullColumn] = [axis === 0 ? own * world.rank : 0, axis === 1 ? wide * world.rank : 0];
	return { shape: [own, wide], block: { ...block, fullRow, fullColumn } };
}

/** A model whose layers share their memory. */
function modelOf(cut: boolean): NamedTensors & Disposable {
	const parts = matrices.map(({ name, shape, axis }) => {
		const part = partOf(shape, cut ? axis : null);
		const values = new Float32Array(part.block.rows * part.block.columns).fill(world.rank + 1);
		return { name, shape, block: part.block, value: Tensor.from(device, values, part.shape) };
	});
	return {
		*logicalTensors() {
			for (let layer = 0; layer < layers; layer++) {
				for (const { name, shape, block, value } of parts) {
					yield {
						name: `layers.${layer}.${name}.weight`,
						shape,
						value: value.share(),
						gradient: null,
						blocks: [block],
					};
				}
			}
		},
		[Symbol.dispose]: () => {
			for (const { value } of parts) value[Symbol.dispose]();
		},
	};
}

/** Seconds of `body`, all ranks beginning and ending together. */
function seconds(body: () => void): number {
	group.barrier();
	const start = performance.now();
	body();
	group.barrier();
	return (performance.now() - start) / 1000;
}

function save(model: NamedTensors, path: string): void {
	if (world.rank === 0) mkdirSync(path);
	group.barrier();
	using gathered = new GatheredTensors(path, model, group, device);
	const share = { first: world.rank === 0, rounds: shareOf(gathered, gathered), barrier: () => group.barrier() };
	writeHuggingFaceFiles(path, gathered, { configText: "{}\n", shardBytes: defaultShardBytes, share });
}

/** As many bytes by as many writers, each a file. */
function write(path: string, bytes: number): void {
	if (world.rank !== 0) return;
	mkdirSync(path);
	const one = (rank: number) =>
		`dd if=/dev/zero of=${join(path, String(rank))} bs=1M count=${Math.ceil(bytes / world.size / 2 ** 20)} conv=fdatasync & `;
	const child = Bun.spawnSync(["sh", "-c", `${[...Array(world.size).keys()].map(one).join("")} wait`], {
		stderr: "pipe",
	});
	if (!child.success) throw new Error(String(child.stderr));
}

const bytes = layers * matrices.reduce((sum, { shape: [rows, columns] }) => sum + 4 * rows * columns, 0);
const times: Record<string, number[]> = { dp: [], tp: [], dd: [] };
const path = join(folder, "written");
for (let round = 0; round < rounds; round++) {
	for (const what of ["dp", "tp"]) {
		using model = modelOf(what === "tp");
		times[what]!.push(seconds(() => save(model, path)));
		if (world.rank === 0) rmSync(path, { recursive: true });
		times.dd!.push(seconds(() => write(path, bytes)));
		if (world.rank === 0) rmSync(path, { recursive: true });
	}
}
if (world.rank === 0) console.log(JSON.stringify({ bytes, times }));
