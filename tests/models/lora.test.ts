/** The weights that have adapters, how adapters are cut and drawn, and which parameters train. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { MergedStore, withoutAdapters } from "../../src/checkpoint/lora/adapters.ts";
import { loadModel, ValueStore } from "../../src/checkpoint/model-store.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { loraModules } from "../../src/config/keys/lora.ts";
import type { HybridConfig } from "../../src/models/language/config.ts";
import { hybridParameters } from "../../src/models/language/names.ts";
import { adaptedWeight, adapterName, isAdapterName } from "../../src/models/lora.ts";
import { logicalNames } from "../../src/models/parameter-spec.ts";
import type { Device } from "../../src/native/device.ts";
import { testDevice } from "../support.ts";
import { batch, Training, tiny } from "../train/training.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const keys = { "hybrid-layer-pattern": "ME*-", "num-experts": 4, "lora-rank": 3, "lora-alpha": 6 };
const everywhere = { ...keys, "lora-target-modules": loraModules };
/** With adapters that add something from the first step on. */
const drawn = (config: HybridConfig): HybridConfig => ({ ...config, lora: { ...config.lora!, start: "drawn" } });

/** Modules with adapters, layer by layer. */
function adapted(more: Record<string, unknown>): string[] {
	const names = hybridParameters(tiny({ ...keys, ...more }))
		.map(({ name }) => name)
		.filter((name) => name.endsWith("adapter.linear_in.weight"));
	return names.map((name) => name.replace(/^.*layers\.(\d+)\./, "$1 ").replace(/\.adapter.*$/, ""));
}

describe("names", () => {
	test("without other words the projections of every layer but Mamba's last, and no routed experts", () => {
		expect(adapted({})).toEqual([
			"0 mixer.in_proj",
			"1 mlp.shared_experts.linear_fc1",
			"1 mlp.shared_experts.linear_fc2",
			"2 self_attention.linear_qkv",
			"2 self_attention.linear_proj",
			"3 mlp.linear_fc1",
			"3 mlp.linear_fc2",
		]);
	});

	test("as targets say", () => {
		expect(adapted({ "lora-target-modules": ["out_proj", "experts.linear_fc1"] })).toEqual([
			"0 mixer.out_proj",
			"1 mlp.experts.linear_fc1",
		]);
		expect(adapted({ "lora-target-modules": ["linear_fc2"] })).toEqual([
			"1 mlp.shared_experts.linear_fc2",
			"3 mlp.linear_fc2",
		]);
	});

	test("an MTP depth has them too", () => {
		const found = hybridParameters(tiny({ ...keys, "hybrid-layer-pattern": "M/*/*" })).map(({ name }) => name);
		expect(found).toContain(
			"language_model.mtp.layers.1.mtp_model_layer.layers.0.self_attention.linear_qkv.adapter.linear_in.weight",
		);
	});

	test("of a matrix and of its weight lead to each other, experts by number", () => {
		const specs = hybridParameters(tiny(everywhere));
		const names = specs.flatMap(logicalNames);
		const matrices = names.filter(isAdapterName);
		expect(matrices).toHaveLength(2 * (2 + 2 + 2 + 2 + 2 * 4));
		for (const name of matrices) {
			const weight = adaptedWeight(name);
			expect(names).toContain(weight);
			expect([adapterName(weight, "a"), adapterName(weight, "b")]).toContain(name);
		}
	});
});

describe("training", () => {
	test("adds nothing at first, then changes adapters alone", async () => {
		const plain = await lossOf(tiny({ ...keys, "lora-rank": null }));
		using run = await Training.open(tiny(everywhere), device);
		using before = new ValueStore("before", run.run.language!);
		expect(run.step(batch(2)).loss).toBe(plain);
		run.step(batch(2, 5));
		using after = new ValueStore("after", run.run.language!);
		for (const name of before.tensors.keys()) {
			const same = Bun.deepEquals(readTensor(before, name), readTensor(after, name));
			// An expert may have had no tokens.
			if (!isAdapterName(name)) expect([name, same]).toEqual([name, true]);
			else if (!name.includes(".experts.")) expect([name, same]).toEqual([name, false]);
		}
	});

	test("merged weights give the same loss", async () => {
		const config = drawn(tiny(everywhere));
		using run = await Training.open(config, device);
		const adaptedLoss = run.step(batch(2)).loss;
		using start = await Training.open(config, device);
		using merged = new MergedStore(new ValueStore("adapted", start.run.language!), 6 / 3);
		using plain = await Training.open({ ...config, lora: null }, device);
		const without = plain.step(batch(2)).loss;
		using other = await Training.open({ ...config, lora: null }, device);
		loadModel(other.run.language!, merged);
		const { loss } = other.step(batch(2));
		expect(Math.abs(loss / adaptedLoss - 1)).toBeLessThan(1e-6);
		expect(Math.abs(without / adaptedLoss - 1)).toBeGreaterThan(1e-3);
	});

	test("the base has neither gradients nor optimizer state", async () => {
		using full = await Training.open(tiny({ ...keys, "lora-rank": null }), device);
		const gradients = () => device.memoryStatistics().liveBytesByTag.gradient;
		const before = gradients();
		using run = await Training.open(tiny(keys), device);
		const after = gradients();
		const adapters = [...run.run.language!.parameters].filter(({ trainable }) => trainable);
		expect(adapters.every(({ name }) => isAdapterName(name))).toBeTrue();
		const elements = adapters.reduce((sum, { value }) => sum + Math.ceil(value.elements / 64) * 64, 0);
		expect(after - before).toBe(4 * elements);
		const { shards } = run.run.state.optimizer;
		expect(
			shards.reduce(
				(sum, { states }) => sum + [...states.values()].reduce((all, { elements }) => all + elements, 0),
				0,
			),
		).toBe(2 * elements);
		// The whole model has many more parameters.
		expect(full.run.language!.parameters.elements).toBeGreaterThan(5 * elements);
	});

	test("dropout drops what enters an adapter alone", async () => {
		const with_ = (dropout: number) => drawn(tiny({ ...keys, "lora-dropout": dropout }));
		const [none, half, again] = [await lossOf(with_(0)), await lossOf(with_(0.5)), await lossOf(with_(0.5))];
		expect(half).toBe(again);
		expect(half).not.toBe(none);
		const zero = { ...tiny({ ...keys, "lora-dropout": 0.5 }) };
		expect(await lossOf(zero)).toBe(await lossOf(tiny({ ...keys, "lora-rank": null })));
	});
});

async function lossOf(config: HybridConfig): Promise<number> {
	using run = await Training.open(config, device);
	return run.step(batch(2)).loss;
}

test("what is not of the adapters is the model's own, drawn as without them", async () => {
	using run = await Training.open(tiny(everywhere), device);
	using plain = await Training.open(tiny({ ...keys, "lora-rank": null }), device);
	using own = new ValueStore("with", withoutAdapters(run.run.language!));
	using other = new ValueStore("without", plain.run.language!);
	expect([...own.tensors.keys()].sort()).toEqual([...other.tensors.keys()].sort());
	for (const name of own.tensors.keys()) expect(readTensor(own, name)).toEqual(readTensor(other, name));
});
