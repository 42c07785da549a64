/**
 * Random damage to everything that is parsed: no crash, no hang, no memory beyond the input's, only named errors. Small
 * seeded counts here, 10⁶ cases in all under MIMO_TEST_FULL.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type ByteSource, OutputFile } from "../../src/checkpoint/files.ts";
import { configurationFromHuggingFace } from "../../src/checkpoint/hf/configuration.ts";
import { parsePythonJson } from "../../src/checkpoint/hf/json.ts";
import { parseManifest } from "../../src/checkpoint/native/manifest.ts";
import { NativeSave, writeShard } from "../../src/checkpoint/native/writer.ts";
import { metadataGlobals, stateGlobals, tensorGlobals } from "../../src/checkpoint/pickle/allowed.ts";
import { TorchArchive } from "../../src/checkpoint/pickle/archive.ts";
import { writeTensor } from "../../src/checkpoint/pickle/archive-writer.ts";
import { unpickle } from "../../src/checkpoint/pickle/machine.ts";
import { Global, PythonObject, TensorReference, TorchDtype, Tuple } from "../../src/checkpoint/pickle/values.ts";
import { Call, instance, pickle, torchSize } from "../../src/checkpoint/pickle/writer.ts";
import { ZipArchive } from "../../src/checkpoint/pickle/zip.ts";
import { parseSafetensors, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { jsonOf } from "../../src/checkpoint/torch-dist/common.ts";
import { parseMetadata } from "../../src/checkpoint/torch-dist/metadata.ts";
import { writeTorchDistFiles } from "../../src/checkpoint/torch-dist/writer.ts";
import { UserError } from "../../src/native/errors.ts";
import { damage, generator, type Random } from "../damage.ts";

/** Cases of each of the five readers. */
const cases = process.env.MIMO_TEST_FULL ? 200_000 : 1_500;

let folder: string;
let items = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-fuzz-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

class Bytes implements ByteSource {
	readonly path = "fuzzed";
	constructor(readonly bytes: Uint8Array) {}
	get size(): number {
		return this.bytes.length;
	}
	read(position: number, length: number): Uint8Array {
		if (position < 0 || length < 0 || position + length > this.size) throw new UserError("fuzzed is truncated.");
		return this.bytes.slice(position, position + length);
	}
	readInto(position: number, into: Uint8Array): void {
		into.set(this.read(position, into.length));
	}
}

/** Runs `parse` on damaged inputs: it returns, or throws a named error. Returns how many were accepted. */
function fuzz(seed: number, count: number, make: (random: Random) => () => unknown): number {
	const random = generator(seed);
	let accepted = 0;
	Bun.gc(true);
	const before = process.memoryUsage().rss;
	for (let i = 0; i < count; i++) {
		const parse = make(random);
		try {
			parse();
			accepted++;
		} catch (error) {
			if (!(error instanceof UserError)) throw new Error(`case ${i} of seed ${seed}: ${error}`, { cause: error });
			if (!/(file|fuzzed)/.test(error.message)) throw new Error(`case ${i} names nothing: ${error.message}`);
		}
	}
	expect(process.memoryUsage().rss - before).toBeLessThan(400e6);
	return accepted;
}

/** Pickles of every kind that is read. */
function pickles(): Uint8Array[] {
	const tensor = new Call(new Global("torch._utils", "_rebuild_parameter"), [1, false]);
	const groups = [
		new Map<unknown, unknown>([
			["lr", 1e-3],
			["betas", new Tuple([0.9, 0.95])],
			["step", 2 ** 40],
		]),
	];
	const arguments_ = new PythonObject(new Global("argparse", "Namespace"), []);
	arguments_.state = new Map<string, unknown>([
		["hidden_size", 128],
		["dtype", new TorchDtype("BF16")],
		["sizes", torchSize([2, 3])],
		["path", new Call(new Global("pathlib", "PosixPath"), ["/", "a"])],
	]);
	const index = instance("torch.distributed.checkpoint.metadata", "MetadataIndex", { fqn: "w", index: null });
	return [
		pickle([
			new Map<unknown, unknown>([
				["args", arguments_],
				["optimizer", groups],
				[0, -(5n ** 40n)],
			]),
		]),
		pickle(new Map([[index, instance("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")]])),
		pickle([tensor]),
	];
}

/** A small whole checkpoint on disk, its files to be damaged. */
function torchDist(): { metadata: Uint8Array; item: Uint8Array } {
	const values = new Uint8Array(96);
	const path = join(folder, "td");
	rmSync(path, { recursive: true, force: true });
	mkdirSync(path);
	writeTorchDistFiles(path, {
		tensors: {
			path,
			tensors: new Map([
				["a.w", { dtype: "F32", shape: [2, 3, 4] }],
				["b.w", { dtype: "BF16", shape: [] }],
			]),
			readInto: (_, offset, into) => into.set(values.subarray(offset, offset + into.length)),
			[Symbol.dispose]: () => {},
		},
		extraStates: new Map([["a._extra_state/shard_0_1", "empty"]]),
		items: new Map(),
		objects: new Map([["o/shard_0_1", new Map([["x", 1]])]]),
		common: new Map([["iteration", 1]]),
	});
	const item = join(folder, `item-${items++}`);
	using file = new OutputFile(item);
	writeTensor(file, "F32", [2, 3], [new Uint8Array(24)]);
	return { metadata: readFileSync(join(path, ".metadata")), item: readFileSync(item) };
}

test("pickles", () => {
	const corpus = [...pickles(), torchDist().metadata];
	const opcodes = Buffer.from(
		"\x80\x02(]}\x29eau0.cRbt\x85\x86\x87\x81q\x00h\x00K\x01NX\x01\x00\x00\x00aQ\x8f\x90\x91\x93\x94",
		"latin1",
	);
	fuzz(1, cases, (random) => {
		const original = corpus[random(corpus.length)]!;
		const bytes =
			random(8) === 0
				? Uint8Array.from({ length: random(200) }, () => opcodes[random(opcodes.length)]!)
				: damage(original, random);
		const allowed = [metadataGlobals, tensorGlobals, stateGlobals()][random(3)]!;
		return () => {
			const value = unpickle(bytes, "file", { allowed, persistent: () => null });
			try {
				jsonOf(value);
			} catch (error) {
				// Too deep or shared too often to be listed.
				if (!(error instanceof RangeError)) throw error;
			}
		};
	});
});

test("indices of torch_dist", () => {
	const { metadata } = torchDist();
	fuzz(2, cases, (random) => {
		const bytes = damage(metadata, random);
		return () => parseMetadata(bytes, "file");
	});
});

test("zip archives", () => {
	const { item } = torchDist();
	fuzz(3, cases, (random) => {
		const source = new Bytes(damage(item, random));
		return () => {
			const archive = new TorchArchive(ZipArchive.open(source));
			const value = archive.load(tensorGlobals, 4096);
			if (value instanceof TensorReference) archive.read(value);
		};
	});
});

test("safetensors", () => {
	const path = join(folder, "small.safetensors");
	writeSafetensors(path, [
		{ name: "w", dtype: "F32", shape: [2, 3], data: () => new Float32Array(6) },
		{ name: "b", dtype: "BF16", shape: [5], data: () => new Uint16Array(5) },
	]);
	const original = readFileSync(path);
	fuzz(4, cases, (random) => {
		const source = new Bytes(damage(original, random));
		return () => {
			const file = parseSafetensors(source);
			let bytes = 0;
			for (const name of file.tensors.keys()) bytes += file.read(name).byteLength;
			expect(bytes).toBeLessThanOrEqual(source.size);
		};
	});
});

test("manifests and config.json", () => {
	const save = NativeSave.begin(join(folder, "native"), 1);
	const data = () => new Float32Array(6);
	const entry = { name: "w", dtype: "F32" as const, shape: [2, 3], offsets: [0, 0], sizes: [2, 3], data };
	const saved = save.publish([writeShard(save.folder, 0, [entry])], { generator: "test", model: {}, common: {} });
	const manifest = readFileSync(join(saved, "index.json"));
	const config = Buffer.from(
		'{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "time_step_limit": [0, {"__float__": "Infinity"}]}',
	);
	const strange = [null, -1, 2 ** 60, 0.5, "", "../x", [], {}, true, [[0]], { file: "a" }];
	/** Replaces one value of a tree of JSON. */
	const replace = (value: unknown, random: Random): unknown => {
		if (typeof value !== "object" || value === null || random(5) === 0) return strange[random(strange.length)];
		const keys = Object.keys(value);
		if (keys.length === 0) return strange[random(strange.length)];
		const key = keys[random(keys.length)]!;
		return Object.assign(Array.isArray(value) ? [...value] : { ...value }, {
			[key]: replace((value as Record<string, unknown>)[key], random),
		});
	};
	fuzz(5, cases, (random) => {
		const [original, read] = random(2)
			? ([manifest, (text: string) => parseManifest(text, "file")] as const)
			: ([config, (text: string) => configurationFromHuggingFace(parsePythonJson(text, "file"), "file")] as const);
		const text =
			random(2) === 0
				? Buffer.from(damage(original, random)).toString()
				: JSON.stringify(replace(JSON.parse(original.toString()), random));
		return () => read(text);
	});
});
