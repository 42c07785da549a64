import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type ConversionOptions, openSource, planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import {
	formatPlanLine,
	inspectCheckpoint,
	planLines,
	requireEqual,
} from "../../../src/checkpoint/conversion/inspect.ts";
import { canonicalLayout } from "../../../src/checkpoint/native/manifest.ts";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { readTensor, selectTensors, type TensorStore } from "../../../src/checkpoint/store.ts";
import { TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
import { golden, largeGolden } from "../../golden.ts";
import { referencePython, runPython } from "../../reference/python.ts";
import { conversionOptions } from "./options.ts";

let folder: string;
let count = 0;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-convert-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const megatron = largeGolden("megatron-checkpoint");
const iteration = join(megatron ?? "", "iter_0000003");
const tiny = golden("hybrid-tiny");
const torch = referencePython("torch");

type Change = Partial<ConversionOptions> & Pick<ConversionOptions, "from" | "to" | "source">;

function optionsFor(change: Change): ConversionOptions {
	return conversionOptions({ target: join(folder, `target-${count++}`), ...change });
}

/** Converts, checks that reading the target again gives the same tensors, and returns where it lies. */
async function convert(change: Change): Promise<string> {
	const options = optionsFor(change);
	using planned = planConversion(options);
	let bytes = 0;
	const written = await planned.run((piece) => {
		bytes += piece;
	});
	expect(bytes).toBe(planned.bytes);
	if (options.to === "peft") throw new Error("PEFT folders hold a part of a model.");
	using again = openSource(written, options.to, options);
	requireEqual(planned.weights, again.weights);
	return written;
}

function hashes(store: TensorStore): Record<string, string> {
	return Object.fromEntries(
		[...store.tensors.keys()].map((name) => [
			name,
			new Bun.CryptoHasher("sha256").update(readTensor(store, name) as Uint8Array).digest("hex"),
		]),
	);
}

/** Loads every tensor with torch.distributed.checkpoint and prints its hash; then the types of other entries. */
const loadScript = `
import hashlib, json, sys, torch
import torch.distributed.checkpoint as dcp
reader = dcp.FileSystemReader(sys.argv[1])
entries = reader.read_metadata().state_dict_metadata
state = {k: torch.empty(v.size, dtype=v.properties.dtype) if hasattr(v, "size") else None for k, v in entries.items()}
dcp.load(state, storage_reader=reader)
hashes = {k: hashlib.sha256(v.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
          for k, v in state.items() if isinstance(v, torch.Tensor)}
common = torch.load(sys.argv[1] + "/common.pt", weights_only=False)
objects = {k: type(v).__name__ for k, v in state.items() if not isinstance(v, torch.Tensor)}
print(json.dumps({"hashes": hashes, "objects": objects, "iteration": common["iteration"],
                  "sharding": common["content_metadata"]["distrib_optim_sharding_type"]}))
`;

describe.skipIf(!megatron)("a Megatron checkpoint", () => {
	const listed = megatron ? JSON.parse(readFileSync(join(megatron, "tensors.json"), "utf8")) : null;
	type Listed = { key: string; name: string; sha256: string; pieces?: unknown };
	let native: string;

	test("to native: every hash of the manifest is the reference's", async () => {
		native = await convert({ from: "torch_dist", to: "native", source: iteration });
		using checkpoint = NativeCheckpoint.open(native);
		for (const { name, sha256 } of listed.logical as Listed[]) {
			expect([name, checkpoint.manifest.tensors[name]!.chunks[0]!.sha256]).toEqual([name, sha256]);
		}
		expect(checkpoint.manifest.iteration).toBe(3);
		expect(checkpoint.manifest.model).toMatchObject({ hybridLayerPattern: "M*E-ME", numExperts: 8, mambaHeadDim: 32 });
		checkpoint.verify();
	});

	test("and back: every model tensor has its key and its bytes", async () => {
		const back = await convert({ from: "native", to: "torch_dist", source: native });
		using stored = TorchDistFolder.open(back);
		const model = (listed.tensors as Listed[]).filter(({ pieces }) => !pieces);
		const found = hashes(selectTensors(stored, (key) => !key.includes("optimizer.state.")));
		expect(found).toEqual(Object.fromEntries(model.map(({ key, sha256 }) => [key, sha256])));
		// The same byte items but for the flat optimizer's and the common state, which became common.pt.
		using original = TorchDistFolder.open(iteration);
		const expected = [...original.objects.keys()].filter((key) => !/optimizer\.distributed|common_state/.test(key));
		for (const key of expected) expect(stored.objects.has(key)).toBe(true);
		expect(existsSync(join(back, "metadata.json"))).toBe(true);
		expect(readFileSync(join(back, "..", "latest_checkpointed_iteration.txt"), "utf8")).toBe("3");
	}, 60_000);

	test.skipIf(!torch)(
		"and PyTorch loads what was written back",
		async () => {
			const back = await convert({ from: "native", to: "torch_dist", source: native });
			using stored = TorchDistFolder.open(back);
			const loaded = JSON.parse(await runPython(torch!, ["-W", "ignore", "-c", loadScript, back]));
			expect(loaded.iteration).toBe(3);
			expect(loaded.sharding).toBe("fully_reshardable");
			expect(loaded.hashes).toEqual(hashes(stored));
		},
		120_000,
	);

	test("without the optimizer, in bf16, with padding rows", async () => {
		const written = await convert({
			from: "torch_dist",
			to: "native",
			source: iteration,
			optimizer: false,
			dtype: "BF16",
			paddedVocabularySize: 1152,
		});
		using checkpoint = NativeCheckpoint.open(written);
		expect(checkpoint.tensors.size).toBe(123);
		const embedding = "language_model.embedding.word_embeddings.weight";
		expect(checkpoint.tensors.get(embedding)).toMatchObject({ dtype: "BF16", shape: [1152, 128] });
		expect(checkpoint.tensors.get("language_model.decoder.layers.0.mixer.A_log")!.dtype).toBe("F32");
		expect(checkpoint.tensors.get("language_model.decoder.layers.2.mlp.router.expert_bias")!.dtype).toBe("F32");
		const rows = readTensor(checkpoint, embedding) as Uint16Array;
		expect(rows.subarray(1024 * 128).every((bits) => bits === 0)).toBe(true);
		await convert({ from: "native", to: "torch_dist", source: written });
	});

	test("to Hugging Face: RADIO and the language model under published names", async () => {
		const change: Change = { from: "native", to: "hf", source: native, visionHeads: 8 };
		expect(() => planConversion(optionsFor(change))).toThrow("Hugging Face's format has no place for");
		const drop = ["*final_layernorm*", "*input_projections*"];
		const options = optionsFor({ ...change, drop });
		using planned = planConversion(options);
		const written = await planned.run(() => {});
		const names = inspectCheckpoint(written, { checksums: false, allowFallback: false }).tensors.map(
			({ name }) => name,
		);
		expect(names).toContain("language_model.backbone.layers.2.mixer.experts.7.down_proj.weight");
		expect(names).toContain("vision_model.radio_model.model.blocks.3.attn.qkv.weight");
		using again = openSource(written, "hf", options);
		requireEqual(planned.weights, again.weights);
		// Rows of the fused projection: all queries, then keys, then values.
		const fused = "encoders.radio_encoder.radio_model.decoder.layers.1.self_attention.linear_qkv.weight";
		const mine = readTensor(again.weights, `modality_submodules.radio_encoder.${fused}`) as Float32Array;
		const theirs = readTensor(again.stored, "vision_model.radio_model.model.blocks.1.attn.qkv.weight") as Float32Array;
		const [h, d, width] = [8, 16, 128];
		for (const [head, part] of [
			[0, 0],
			[3, 1],
			[7, 2],
		] as const) {
			const from = (part * h * d + head * d) * width;
			const to = (head * 3 * d + part * d) * width;
			expect(mine.slice(to, to + d * width)).toEqual(theirs.slice(from, from + d * width));
		}
	});
});

describe("a NemotronH folder", () => {
	test("to native and back: every byte, in the source's spelling", async () => {
		const native = await convert({ from: "hf", to: "native", source: tiny });
		const back = await convert({ from: "native", to: "hf", source: native });
		for (const file of ["config.json", "model.safetensors"]) {
			expect(readFileSync(join(back, file)).equals(readFileSync(join(tiny, file)))).toBe(true);
		}
		const published = await convert({ from: "native", to: "hf", source: native, names: "published" });
		const names = inspectCheckpoint(published, { checksums: false, allowFallback: false }).tensors;
		expect(names.map(({ name }) => name)).toContain("backbone.layers.1.mixer.experts.0.up_proj.weight");
		const again = await convert({ from: "hf", to: "hf", source: published, names: "transformers", shardBytes: 3e5 });
		expect(readdirSync(again)).toContain("model.safetensors.index.json");
		using raw = openSource(again, "hf", optionsFor({ from: "hf", to: "hf", source: again }));
		using source = openSource(tiny, "hf", optionsFor({ from: "hf", to: "hf", source: tiny }));
		expect(hashes(raw.stored)).toEqual(hashes(source.stored));
	});

	test("to torch_dist and back: a release checkpoint", async () => {
		const release = await convert({ from: "hf", to: "torch_dist", source: tiny });
		expect(release).toEndWith("release");
		using stored = TorchDistFolder.open(release);
		expect(stored.tensors.get("decoder.layers.1.mlp.experts.experts.linear_fc1.weight")!.shape).toEqual([8, 48, 64]);
		expect(stored.objects.has("decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_7_8")).toBe(true);
		const back = await convert({ from: "torch_dist", to: "hf", source: release, names: "transformers" });
		const file = "model.safetensors";
		expect(readFileSync(join(back, file)).equals(readFileSync(join(tiny, file)))).toBe(true);
		const reference = await convert({ from: "torch_dist", to: "hf", source: release, reference: tiny });
		expect(readFileSync(join(reference, "config.json"), "utf8")).toBe(readFileSync(join(tiny, "config.json"), "utf8"));
	});

	test("grouped experts", async () => {
		const layout = { ...canonicalLayout, experts: "grouped" as const };
		const grouped = await convert({ from: "hf", to: "native", source: tiny, layout });
		using checkpoint = NativeCheckpoint.open(grouped);
		const name = "language_model.decoder.layers.1.mlp.experts.linear_fc1.weight";
		expect(checkpoint.tensors.get(name)!.shape).toEqual([8, 48, 64]);
		await convert({ from: "native", to: "hf", source: grouped });
	});

	test("layers counted by group", async () => {
		const layout = { ...canonicalLayout, layerNames: "logical" as const, pattern: "M[*-]E" };
		const bad = optionsFor({ from: "hf", to: "native", source: tiny, layout });
		expect(() => planConversion(bad)).toThrow("belongs to no layer of pattern");
		// ME*M-E with two groups.
		const fitting = { ...layout, pattern: "[ME]*[M-]E" };
		const grouped = await convert({ from: "hf", to: "native", source: tiny, layout: fitting });
		using checkpoint = NativeCheckpoint.open(grouped);
		expect(checkpoint.tensors.has("language_model.decoder.layers.0.pre_mlp_layernorm.weight")).toBe(true);
		expect(checkpoint.tensors.has("language_model.decoder.layers.2.mlp.linear_fc1.weight")).toBe(true);
		expect(checkpoint.tensors.has("language_model.decoder.final_layernorm.weight")).toBe(true);
	});

	test("a dry run lists every tensor's sources and writes no files", () => {
		const options = optionsFor({ from: "hf", to: "native", source: tiny });
		using planned = planConversion(options);
		const lines = planLines(planned.tensors);
		const fused = lines.find(({ to }) => to.endsWith("linear_qkv.weight"))!;
		expect(formatPlanLine(fused)).toBe(
			"language_model.decoder.layers.2.self_attention.linear_qkv.weight  [128, 64] F32  ← " +
				"model.layers.2.mixer.q_proj.weight + model.layers.2.mixer.k_proj.weight + model.layers.2.mixer.v_proj.weight",
		);
		using back = planConversion(optionsFor({ from: "hf", to: "torch_dist", source: tiny }));
		const stacked = planLines(back.tensors).find(({ to }) => to.endsWith("experts.experts.linear_fc1.weight"))!;
		expect(stacked.from).toEqual(["model.layers.1.mixer.experts.up_proj"]);
		expect(existsSync(options.target)).toBe(false);
	});

	test("a failure leaves no files, and a target with files is refused", async () => {
		const options = optionsFor({ from: "hf", to: "native", source: tiny });
		using planned = planConversion(options);
		const failing = planned.run(() => {
			throw new Error("stop here");
		});
		const failure = await failing.catch((error: Error) => error.message);
		expect(failure).toBe("stop here");
		expect(readdirSync(folder).filter((name) => name.includes(".tmp-"))).toEqual([]);
		expect(existsSync(options.target)).toBe(false);
		await planned.run(() => {});
		expect(() => planConversion(options)).toThrow("the folder is not empty (--force replaces it)");
		using forced = planConversion({ ...options, force: true });
		await forced.run(() => {});
	});

	test("a difference is named", async () => {
		using source = openSource(tiny, "hf", optionsFor({ from: "hf", to: "hf", source: tiny }));
		const name = "language_model.decoder.layers.0.mixer.D";
		const other: TensorStore = {
			...selectTensors(source.weights, () => true),
			path: "there",
			readInto: (tensor, offset, into) => {
				source.weights.readInto(tensor, offset, into);
				if (tensor === name) into[0]! ^= 1;
			},
		};
		expect(() => requireEqual(source.weights, other)).toThrow(`there: ${name} differs from the source's`);
		const fewer = selectTensors(source.weights, (tensor) => tensor !== name);
		expect(() => requireEqual(source.weights, fewer)).toThrow(`has no tensor ${name}`);
		expect(() => requireEqual(fewer, source.weights)).toThrow(`a tensor ${name} that was not to be written`);
		const infinite: TensorStore = {
			...selectTensors(source.weights, () => true),
			readInto: (tensor, offset, into) => {
				source.weights.readInto(tensor, offset, into);
				// The second value of float32.
				if (tensor === name) new DataView(into.buffer, into.byteOffset).setFloat32(4, Number.POSITIVE_INFINITY, true);
			},
		};
		const { size } = source.weights.tensors;
		expect(requireEqual(source.weights, source.weights)).toEqual({ count: size, notFinite: [] });
		expect(requireEqual(infinite, infinite)).toEqual({ count: size, notFinite: [name] });
	});

	test("invalid combinations of options are refused by name", () => {
		const refuse = (change: Partial<ConversionOptions>, sentence: string) =>
			expect(() => planConversion(optionsFor({ from: "hf", to: "native", source: tiny, ...change }))).toThrow(sentence);
		refuse({ drop: ["nothing*"] }, "--drop nothing* matches no tensor");
		refuse({ paddedVocabularySize: 100 }, "100 rows are too few for a vocabulary of 512 tokens");
		refuse({ source: join(folder, "none") }, "it does not exist");
	});
});

test("inspect lists each format with its checksums", async () => {
	const native = await convert({ from: "hf", to: "native", source: tiny });
	const lists = [tiny, join(tiny, "model.safetensors"), native, join(native, "..")].map((path) =>
		inspectCheckpoint(path, { checksums: true, allowFallback: false }),
	);
	expect(lists.map(({ format }) => format)).toEqual(["hf", "safetensors", "native", "native"]);
	const sum = (list: number, name: string) => lists[list]!.tensors.find((tensor) => tensor.name === name)!.sha256;
	expect(sum(0, "model.norm_f.weight")).toBe(sum(2, "language_model.decoder.final_norm.weight"));
	expect(sum(1, "model.norm_f.weight")).toBe(sum(0, "model.norm_f.weight"));
	expect(lists[2]!.bytes).toBe(lists[0]!.bytes);
	expect(() => inspectCheckpoint(folder, { checksums: true, allowFallback: false })).toThrow(
		"is not a checkpoint of a known",
	);
});
