/** How the layers of a torch_dist checkpoint are numbered, as its names, its arguments and the user tell it. */
import { describe, expect, test } from "bun:test";
import { fromLayout } from "../../../src/checkpoint/conversion/layouts.ts";
import {
	layerArguments,
	layersInCheckpoint,
	layersToWrite,
	namesToWrite,
	physicalNames,
	stacksLayers,
} from "../../../src/checkpoint/conversion/megatron-layers.ts";
import { MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { canonicalLayout } from "../../../src/checkpoint/native/manifest.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { patternOfArguments } from "../../../src/checkpoint/torch-dist/arguments.ts";
import { readKeys, writeKeys } from "../../../src/checkpoint/torch-dist/keys.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import type { Key } from "../../../src/config/schema.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { hybridParameters } from "../../../src/models/language/names.ts";
import { memoryStore } from "../memory-store.ts";

const layer = (index: number, rest: string) => `language_model.decoder.layers.${index}.${rest}`;
const attention = "self_attention.linear_qkv.weight";
const mlp = "mlp.linear_fc1.weight";
const experts = "mlp.experts.linear_fc1.weight0";
const router = "mlp.router.weight";
const mamba = "mixer.A_log";
const lastNorm = (name: string) => `language_model.decoder.${name}.weight`;

function store(...names: string[]) {
	return memoryStore(Object.fromEntries(names.map((name, i) => [name, { shape: [1], values: Float32Array.of(i) }])));
}
const grouped = store(layer(0, mamba), layer(1, attention), layer(1, mlp), lastNorm("final_layernorm"));
const gpt = store(layer(0, attention), layer(0, mlp), layer(1, attention), layer(1, mlp), lastNorm("final_layernorm"));

describe("reading", () => {
	const read = (weights: typeof grouped, own: string | null, given: string | null = null) =>
		layersInCheckpoint(weights, own === null ? {} : { hybrid_layer_pattern: own }, given, "here");

	test("the name of the last norm tells whether layers are counted by group", () => {
		expect(read(grouped, "M[*-]")).toMatchObject({ names: "logical", pattern: "M[*-]" });
		const physical = store(layer(0, mamba), layer(1, attention), layer(2, mlp), lastNorm("final_norm"));
		expect(read(physical, "M[*-]").names).toBe("physical");
		expect(read(physical, "M*-", "[M*-]").names).toBe("physical");
		expect(read(physical, null).names).toBe("physical");
	});

	test("groups come from the checkpoint, or from the user where it has none", () => {
		expect(read(grouped, "M*-", "M[*-]").pattern).toBe("M[*-]");
		expect(read(grouped, null, "M[*-]")).toMatchObject({ names: "logical", pattern: "M[*-]" });
		expect(read(grouped, "M[*-]", "[M*]-").pattern).toBe("M[*-]");
		expect(() => read(grouped, "M*-")).toThrow(
			"here counts layers by their groups (its last norm is decoder.final_layernorm)",
		);
		expect(() => read(grouped, null)).toThrow("but it has no pattern; name them with --hybrid-layer-pattern");
		expect(() => read(grouped, "M[*-]", "M[*E]")).toThrow('here has the layers "M*-", and the pattern given has "M*E"');
		expect(() => physicalNames(grouped, read(grouped, "[M*]-"), "here")).toThrow("belongs to no layer of pattern");
	});

	test("a GPT model: layers of attention and MLP, no pattern of its own", () => {
		expect(read(gpt, null)).toMatchObject({ names: "gpt", pattern: "[*-][*-]" });
		expect(read(gpt, null, "**M--").names).toBe("gpt");
		const names = (pattern: string | null) => [...physicalNames(gpt, read(gpt, null, pattern), "here").tensors.keys()];
		expect(names("**M--").slice(0, 4)).toEqual([
			layer(0, attention),
			layer(3, mlp),
			layer(1, attention),
			layer(4, mlp),
		]);
		const routed = store(layer(0, attention), layer(0, router), layer(0, experts), lastNorm("final_layernorm"));
		expect(read(routed, null).pattern).toBe("[*E]");
		const mixed = store(
			layer(0, attention),
			layer(0, mlp),
			layer(1, attention),
			layer(1, router),
			lastNorm("final_layernorm"),
		);
		expect(read(mixed, null).pattern).toBe("[*-][*E]");
		const [depth, norm] = ["language_model.mtp.layers.0.", "pre_mlp_layernorm.weight"];
		for (const own of ["mtp_model_layer", "transformer_layer"]) {
			const predicting = store(...gpt.tensors.keys(), `${depth}${own}.${attention}`, `${depth}${own}.${norm}`);
			const layers = read(predicting, null);
			expect(layers.pattern).toBe("[*-][*-]/*-");
			expect([...physicalNames(predicting, layers, "here").tensors.keys()].slice(-2)).toEqual([
				`${depth}mtp_model_layer.layers.0.${attention}`,
				`${depth}mtp_model_layer.layers.1.${norm}`,
			]);
		}
	});

	test("tensors of a GPT model without a place here are named", () => {
		const others = ["embedding.tokentype_embeddings.weight", "mtp.layers.0.gate.weight"].map(
			(name) => `language_model.${name}`,
		);
		const weights = store(...gpt.tensors.keys(), layer(0, "cross_attention.linear_q.weight"), ...others);
		expect(() => read(weights, null)).toThrow(
			`here is of a GPT model with tensors that this program's has no place for: ${[layer(0, "cross_attention.linear_q.weight"), ...others].join(", ")}.`,
		);
	});

	test("Megatron-Bridge keeps the layers of MTP depths apart", () => {
		const bridge = { hybrid_layer_pattern: "ME*-", mtp_hybrid_override_pattern: "*E", mtp_num_layers: 2 };
		expect(patternOfArguments(bridge)).toBe("ME*-/*E/*E");
		expect(patternOfArguments({ ...bridge, hybrid_layer_pattern: "ME/*E" })).toBe("ME/*E");
		expect(patternOfArguments({ hybrid_override_pattern: "ME//" })).toBe("ME");
		expect(patternOfArguments({ hybrid_layer_pattern: null })).toBeNull();
	});
});

describe("writing", () => {
	const physical = store(layer(0, mamba), layer(1, attention), layer(2, mlp), lastNorm("final_norm"));

	test("has Megatron's names and arguments, and omits what Megatron lacks", () => {
		const written = (names: Parameters<typeof layersToWrite>[0]) => {
			const layers = layersToWrite(names, "M[*-]", "here");
			const { tensors, leftOut } = namesToWrite(physical, layers, "here");
			return { names: [...tensors.tensors.keys()], leftOut, args: layerArguments(layers) };
		};
		expect(written("physical")).toEqual({
			names: [...physical.tensors.keys()],
			leftOut: [],
			args: { hybrid_layer_pattern: "M*-", num_layers: 3 },
		});
		expect(written("logical")).toEqual({
			names: [...grouped.tensors.keys()],
			leftOut: [],
			args: { hybrid_layer_pattern: "M[*-]", num_layers: 3 },
		});
		expect(written("gpt")).toEqual({
			names: [layer(0, attention), layer(0, mlp), lastNorm("final_layernorm")],
			leftOut: [0],
			args: { hybrid_layer_pattern: null, hybrid_override_pattern: null, num_layers: 1 },
		});
	});

	const norms = { normalization: "LayerNorm", "add-qkv-bias": true };
	const models: Readonly<Record<string, Partial<Record<Key, unknown>>>> = {
		"dense layers and experts, multi-token prediction": { ...norms, "hybrid-layer-pattern": "[*-][*E]/*E/*E" },
		"learned positions and biases": {
			...{ ...norms, "hybrid-layer-pattern": "**--", "add-bias-linear": true },
			"position-embedding-type": "learned_absolute",
		},
	};
	for (const [name, values] of Object.entries(models)) {
		test(`a GPT model with ${name} comes back from its keys as it was`, () => {
			const c = configurationOf({ preset: "nemotron-tiny", "hidden-size": 64, ...values }, { trains: false });
			const specs = hybridParameters(hybridConfig(c));
			const tensors = specs.map(({ name, shape }, i) => {
				const values = new Float32Array(shape.reduce((a, b) => a * b, 1)).map((_, at) => i + at / 2 ** 20);
				return [name, { shape, values }] as const;
			});
			// Parameters have the experts of a layer in one tensor.
			const grouped = { ...canonicalLayout, experts: "grouped", gluTensorParallel: 1 } as const;
			const model = fromLayout(memoryStore(Object.fromEntries(tensors)), grouped, "here");
			const layers = layersToWrite("gpt", c.hybridLayerPattern, "here");
			const named = namesToWrite(model, layers, "here").tensors;
			const keys = writeKeys(named.tensors, { plain: true, wrappers: {} }, "here", stacksLayers(layers));
			const written = new MappedStore(named, planTensors(named, keys, "foreign"));
			expect([...written.tensors.keys()].filter((key) => /layers\.\d+\.mtp_model_layer\.layers/.test(key))).toEqual([]);
			const { correspondence } = readKeys(written.tensors, "here");
			const stored = new MappedStore(written, planTensors(written, correspondence, "logical"));
			const found = layersInCheckpoint(stored, layerArguments(layers), null, "here");
			const order = name.startsWith("dense") ? c.hybridLayerPattern : "[*-][*-]";
			expect(found).toMatchObject({ names: "gpt", pattern: order });
			const again = physicalNames(stored, layersInCheckpoint(stored, {}, c.hybridLayerPattern, "here"), "here");
			expect([...again.tensors.keys()].sort()).toEqual([...model.tensors.keys()].sort());
			for (const key of model.tensors.keys())
				expect([key, readTensor(again, key)]).toEqual([key, readTensor(model, key)]);
		});
	}

	test("which layers of a GPT model have experts is among its arguments", () => {
		const args = (pattern: string) => layerArguments(layersToWrite("gpt", pattern, "here"));
		expect(args("[*-][*E]").moe_layer_freq).toEqual([0, 1]);
		expect(args("[*E][*E]").moe_layer_freq).toBe(1);
		expect(args("[*-]").moe_layer_freq).toBeUndefined();
		expect(() => args("[*-]/ME")).toThrow("its multi-token prediction has the layers ME");
	});

	test("layers that are unknown, or have no groups", () => {
		expect(() => layersToWrite("logical", null, "here")).toThrow("here: the model's layers are unknown");
		expect(() => layersToWrite("gpt", null, "here")).toThrow("here: the model's layers are unknown");
		expect(() => layersToWrite("logical", "M*-", "here")).toThrow('pattern "M*-" has no groups to count layers by');
		expect(layersToWrite("physical", null, "here")).toEqual({ names: "physical", pattern: null, layers: [] });
	});
});
