/** A checkpoint that PyTorch itself wrote, with Megatron-LM's keys: a reference for torch_dist in every clone. */
import { beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { readPieces, type TensorStore } from "../../../src/checkpoint/store.ts";
import { resolveIteration, TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
import { readKeys, writeKeys } from "../../../src/checkpoint/torch-dist/keys.ts";
import { golden } from "../../golden.ts";

interface Listed {
	readonly key: string;
	readonly name: string;
	readonly sha256: string;
	readonly chunks: number;
}

let iteration: string;
let listed: { readonly tensors: readonly Listed[]; readonly logical: readonly Listed[] };
beforeAll(() => {
	const source = golden("torch-dist-small");
	iteration = resolveIteration(source).folder;
	listed = JSON.parse(readFileSync(join(source, "tensors.json"), "utf8"));
});

function sha256(store: TensorStore, name: string): string {
	const hasher = new Bun.CryptoHasher("sha256");
	for (const piece of readPieces(store, name, { pieceBytes: 10_003 })) hasher.update(piece);
	return hasher.digest("hex");
}

test("every tensor as PyTorch loads it, shards of both processes joined", () => {
	using opened = TorchDistFolder.open(iteration);
	expect([...opened.tensors.keys()].sort()).toEqual(listed.tensors.map(({ key }) => key).sort());
	for (const { key, sha256: expected, chunks } of listed.tensors) {
		expect([key, sha256(opened, key), opened.tensors.get(key)!.chunks.length]).toEqual([key, expected, chunks]);
	}
	expect(listed.tensors.filter(({ chunks }) => chunks === 2).length).toBeGreaterThan(100);
});

test("logical names, and back to the keys on disk", () => {
	using opened = TorchDistFolder.open(iteration);
	const { correspondence, style, buffers } = readKeys(opened.tensors, iteration);
	expect(buffers).toEqual([]);
	const model = new MappedStore(opened, planTensors(opened, correspondence, "logical"));
	for (const { name, sha256: expected } of listed.logical)
		expect([name, sha256(model, name)]).toEqual([name, expected]);
	const parameters = listed.logical.filter(({ name }) => !name.endsWith("expert_bias"));
	expect(model.tensors.size).toBe(listed.logical.length + 3 * parameters.length);
	const back = new MappedStore(model, planTensors(model, writeKeys(model.tensors, style, iteration), "foreign"));
	for (const { key, sha256: expected } of listed.tensors) expect([key, sha256(back, key)]).toEqual([key, expected]);
	expect(back.tensors.size).toBe(listed.tensors.length);
});

test("Megatron-LM's own keys stand for these logical tensors, and are written again", () => {
	const path = join(import.meta.dir, "../../golden/megatron-keys.json");
	const { tensors, logical } = JSON.parse(readFileSync(path, "utf8")) as Record<string, Record<string, number[]>>;
	const shapes = (entries: Record<string, number[]>) =>
		new Map(Object.entries(entries).map(([name, shape]) => [name, { shape, dtype: "F32" as const }]));
	const plain = (found: ReadonlyMap<string, readonly number[]>) => Object.fromEntries([...found].sort());
	const { correspondence, style } = readKeys(shapes(tensors!), path);
	expect(plain(correspondence.logical)).toEqual(logical!);
	expect(plain(writeKeys(shapes(logical!), style, path).foreign)).toEqual(tensors!);
});

test("a router's copies of several stages are one router, and are written again", () => {
	const [gate, path] = ["gate_mlp.0.weight", "checkpoint"];
	const stored = ["router_pp0", "router_pp1", "router"].map((root) => `${root}.${gate}`);
	const keys = [...stored, ...stored.map((key) => `optimizer.state.exp_avg.${key}`)];
	const shapes = new Map(keys.map((key) => [key, { shape: [4, 2], dtype: "F32" as const }]));
	const { correspondence, style } = readKeys(shapes, path);
	const logical = [`elastic_router.${gate}`, `optimizer.state.exp_avg.elastic_router.${gate}`];
	expect([...correspondence.logical.keys()]).toEqual(logical);
	expect(correspondence.links.map(({ foreign }) => foreign)).toEqual([keys[0]!, keys[3]!]);
	const named = new Map(logical.map((name) => [name, { shape: [4, 2], dtype: "F32" as const }]));
	expect([...writeKeys(named, style, path).foreign.keys()].sort()).toEqual(keys.sort());
	const wrapped = { plain: false, wrappers: { "language_model.": "module." } };
	expect([...writeKeys(named, wrapped, path).foreign.keys()]).toEqual([
		`language_model.module.router_pp0.${gate}`,
		`mimo.language.optimizer.state.exp_avg.language_model.module.router_pp0.${gate}`,
	]);
});
