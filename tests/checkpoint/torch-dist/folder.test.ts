import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
	cpSync,
	mkdirSync,
	mkdtempSync,
	readFileSync,
	rmSync,
	symlinkSync,
	truncateSync,
	writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { readPieces, readTensor, selectTensors, type TensorStore } from "../../../src/checkpoint/store.ts";
import { resolveIteration, TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
import { readKeys, writeKeys } from "../../../src/checkpoint/torch-dist/keys.ts";
import { optimizerBuffers } from "../../../src/checkpoint/torch-dist/optimizer-buffers.ts";
import { largeGolden } from "../../golden.ts";

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-torch-dist-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

interface Piece {
	readonly offset: number;
	readonly length: number;
	readonly parameter: string | null;
}
interface Listed {
	readonly key: string;
	readonly name: string;
	readonly sha256: string;
	readonly pieces?: readonly Piece[];
}

const source = largeGolden("megatron-checkpoint");
const iteration = join(source ?? "", "iter_0000003");
const listed = source ? JSON.parse(readFileSync(join(source, "tensors.json"), "utf8")) : null;

function sha256(store: TensorStore, name: string, pieceBytes: number): string {
	const hasher = new Bun.CryptoHasher("sha256");
	for (const piece of readPieces(store, name, { pieceBytes })) hasher.update(piece);
	return hasher.digest("hex");
}

describe.skipIf(!source)("a checkpoint of Megatron", () => {
	test("every tensor and byte item as PyTorch loads it", () => {
		using opened = TorchDistFolder.open(iteration);
		for (const { key, sha256: expected } of listed.tensors as Listed[]) {
			expect([key, sha256(opened, key, 100_003)]).toEqual([key, expected]);
		}
		for (const { key, sha256: expected } of listed.byte_items as Listed[]) {
			const actual = new Bun.CryptoHasher("sha256").update(opened.readItem(key)).digest("hex");
			expect([key, actual]).toEqual([key, expected]);
		}
		expect(opened.tensors.size).toBe(listed.tensors.length);
		expect(opened.objects.size).toBe(listed.byte_items.length);
	});

	test("logical names, and back to the keys on disk", () => {
		using opened = TorchDistFolder.open(iteration);
		const { correspondence, style, buffers } = readKeys(opened.tensors, iteration);
		const stored = selectTensors(opened, (key) => !buffers.includes(key));
		const model = new MappedStore(stored, planTensors(stored, correspondence, "logical"));
		expect([...model.tensors.keys()].sort()).toEqual((listed.logical as Listed[]).map(({ name }) => name).sort());
		for (const { name, sha256: expected } of listed.logical as Listed[]) {
			expect([name, sha256(model, name, 9_001)]).toEqual([name, expected]);
		}
		const back = new MappedStore(model, planTensors(model, writeKeys(model.tensors, style, iteration), "foreign"));
		expect(new Set(back.tensors.keys())).toEqual(new Set(stored.tensors.keys()));
		for (const { key, sha256: expected } of listed.tensors as Listed[]) {
			if (!buffers.includes(key)) expect([key, sha256(back, key, 70_001)]).toEqual([key, expected]);
		}
	});

	test("the flat optimizer buffers, piece by piece", () => {
		using opened = TorchDistFolder.open(iteration);
		const { correspondence, buffers } = readKeys(opened.tensors, iteration);
		const weights = selectTensors(opened, (key) => !buffers.includes(key));
		const model = new MappedStore(weights, planTensors(weights, correspondence, "logical"));
		const flat = selectTensors(opened, (key) => buffers.includes(key));
		const found = optimizerBuffers(flat, buffers, model);
		const optimizer = new MappedStore(flat, planTensors(flat, found, "logical"));
		// Every piece's first rank: the values that the parameter's own tensors hold there.
		let compared = 0;
		for (const { key, pieces } of (listed.tensors as Listed[]).filter(({ pieces }) => pieces)) {
			const state = key.split(".").at(-1);
			const buffer = readTensor(flat, key) as Float32Array;
			for (const { offset, length, parameter } of pieces!) {
				if (parameter === null) continue;
				const name = `optimizer.state.${state}.${parameter}`;
				const links = found.links.filter(({ foreign, logical }) => foreign === key && logical === name);
				const [first] = links;
				if (!first) {
					// Replicated: another rank's buffer is read.
					expect(key).toContain("dp_group_idx_1");
					continue;
				}
				expect([first.foreignRuns.offset, links.reduce((n, link) => n + link.count * link.length, 0)]).toEqual([
					offset,
					length,
				]);
				const whole = readTensor(optimizer, name) as Float32Array;
				for (const { foreignRuns, logicalRuns, count, length: run } of links) {
					for (let i = 0; i < count; i++) {
						const from = foreignRuns.offset + i * foreignRuns.stride;
						const to = logicalRuns.offset + i * logicalRuns.stride;
						expect(Buffer.compare(view(buffer, from, run), view(whole, to, run))).toBe(0);
					}
				}
				compared++;
			}
		}
		expect(compared).toBeGreaterThan(500);
		expect(optimizer.tensors.size).toBe(3 * 121);
	});

	test("buffers of another model are refused", () => {
		using opened = TorchDistFolder.open(iteration);
		const { correspondence, buffers } = readKeys(opened.tensors, iteration);
		const weights = selectTensors(opened, (key) => !buffers.includes(key));
		const plan = planTensors(weights, correspondence, "logical");
		const flat = selectTensors(opened, (key) => buffers.includes(key));
		const swapped = plan.map((tensor) =>
			tensor.name.endsWith("layers.0.mixer.out_proj.weight")
				? { ...tensor, copies: plan.find(({ name }) => name.endsWith("layers.4.mixer.out_proj.weight"))!.copies }
				: tensor,
		);
		expect(() => optimizerBuffers(flat, buffers, new MappedStore(weights, swapped))).toThrow(
			"its values at the position of language_model.decoder.layers.0.mixer.out_proj.weight differ from that weight",
		);
		const fewer = plan.filter(({ name }) => !name.includes("layers.5"));
		expect(() => optimizerBuffers(flat, buffers, new MappedStore(weights, fewer))).toThrow("--no-optimizer");
	});

	test("a root folder whose tracker names a missing iteration", () => {
		const { folder: found, notice } = resolveIteration(source!);
		expect(found).toBe(iteration);
		expect(notice).toContain("iter_0000003 is read");
	});

	/** A copy whose files are links to the originals' bytes, to be damaged. */
	const copy = (name: string) => {
		const target = join(folder, name);
		cpSync(iteration, target, { recursive: true });
		return target;
	};

	test("damage is named", () => {
		const short = copy("short");
		truncateSync(join(short, "__3_0.distcp"), 10_000_000);
		expect(() => TorchDistFolder.open(short)).toThrow("__3_0.distcp is truncated: it has 10000000 bytes");
		rmSync(join(short, "__3_0.distcp"));
		expect(() => TorchDistFolder.open(short)).toThrow("__3_0.distcp: it does not exist");
		symlinkSync(join(iteration, "__3_0.distcp"), join(short, "__3_0.distcp"));
		expect(() => TorchDistFolder.open(short)).toThrow("it is a symbolic link");
		rmSync(join(short, ".metadata"));
		expect(() => TorchDistFolder.open(short)).toThrow("it has no .metadata");

		const altered = copy("altered");
		const key = "language_model.module.output_layer.weight";
		using opened = TorchDistFolder.open(altered);
		const { file, position, length } = opened.tensors.get(key)!.chunks[0]!;
		const bytes = readFileSync(join(altered, file));
		bytes[position + length - 2000]! ^= 1;
		writeFileSync(join(altered, file), bytes);
		expect(() => readTensor(opened, key)).toThrow(`tensor ${key} is damaged (its checksum differs)`);
	});

	test("an index cut anywhere is refused", () => {
		const cut = join(folder, "cut");
		mkdirSync(cut);
		const whole = readFileSync(join(iteration, ".metadata"));
		for (let i = 0; i < 60; i++) {
			writeFileSync(join(cut, ".metadata"), whole.subarray(0, Math.floor((whole.length * i) / 60)));
			expect(() => TorchDistFolder.open(cut)).toThrow(cut);
		}
	});
});

function view(values: Float32Array, offset: number, length: number): Uint8Array {
	return new Uint8Array(values.buffer, values.byteOffset + offset * 4, length * 4);
}

test("folders that are not checkpoints", () => {
	expect(() => TorchDistFolder.open(join(folder, "none"))).toThrow("it does not exist");
	expect(() => TorchDistFolder.open(folder)).toThrow("it has no .metadata");
	const legacy = join(folder, "legacy");
	mkdirSync(join(legacy, "mp_rank_00"), { recursive: true });
	expect(() => TorchDistFolder.open(legacy)).toThrow("old format");
	const tracked = join(folder, "tracked");
	mkdirSync(join(tracked, "iter_0000001"), { recursive: true });
	mkdirSync(join(tracked, "iter_0000002"));
	writeFileSync(join(tracked, "latest_checkpointed_iteration.txt"), "7\n");
	expect(() => resolveIteration(tracked)).toThrow("iter_0000007, which does not exist; the newest that exists is");
	writeFileSync(join(tracked, "latest_checkpointed_iteration.txt"), "../x");
	expect(() => resolveIteration(tracked)).toThrow("which is not an iteration");
	writeFileSync(join(tracked, "latest_checkpointed_iteration.txt"), " 2\n");
	expect(resolveIteration(tracked).folder).toBe(join(tracked, "iter_0000002"));
});
