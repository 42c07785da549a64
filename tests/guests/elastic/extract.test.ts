/** A submodel that was cut out computes what its masked parent computes (docs/spec/elastic.md §16). */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { readTensor, SelectedStore } from "../../../src/checkpoint/store.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import type { Key, TrainingConfiguration } from "../../../src/config/schema.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { choiceOf, formatChoice } from "../../../src/guests/elastic/submodel/choice.ts";
import { patternOf, submodelKeys, unitsOfSubmodel } from "../../../src/guests/elastic/submodel/configuration.ts";
import { parentSubmodel, type Submodel } from "../../../src/guests/elastic/submodel/submodel.ts";
import { selectionsOf } from "../../../src/guests/elastic/submodel/units.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import type { Device } from "../../../src/native/device.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { memoryStore } from "../../checkpoint/memory-store.ts";
import { randomValues, relativeRms, testDevice } from "../../support.ts";
import { parentModel } from "./family-model.ts";
import { maskExperts, maskedConfig, maskedWeights } from "./masked-parent.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const parents: Readonly<Record<string, Partial<Record<Key, unknown>>>> = {
	"sigmoid router, squared ReLU": {},
	"softmax router, gated activation, rotary positions, tied embeddings": {
		"moe-router-score-function": "softmax",
		"moe-router-enable-expert-bias": false,
		"squared-relu": false,
		swiglu: true,
		"position-embedding-type": "rope",
		"untie-embeddings-and-output-weights": false,
	},
	"biases, quick GEGLU": {
		"moe-shared-expert-intermediate-size": 0,
		"add-bias-linear": true,
		"squared-relu": false,
		"quick-geglu": true,
		"glu-linear-offset": 1,
	},
};

const vocabulary = 61;
const tokens = 40;
const ids = Int32Array.from({ length: tokens }, (_, t) => (7 * t + ((t * t) % 13)) % vocabulary);

function logitsOf(model: HybridModel): Float32Array {
	const text = { ids, labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths: [25, 15] };
	using input = new DeviceInput(device, text, model.parallel);
	const forward = input.forward(0, TokenSlice.of(0, tokens));
	using logits = model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null);
	const values = logits.toFloat32();
	return values.filter((_, i) => i % logits.width < vocabulary);
}

/** A submodel with sizes of its own in every layer; some layers may be left out. */
function randomSubmodel(parent: Submodel, seed: number): Submodel {
	const draws = randomValues(64, seed);
	let drawn = 0;
	const pick = (least: number, most: number, step = 1) => {
		const count = Math.floor((most - least) / step) + 1;
		return least + step * Math.min(count - 1, Math.floor(((draws[drawn++]! + 1) / 2) * count));
	};
	const keptLayers = parent.keptLayers.map(() => pick(0, 3) > 0);
	return {
		hiddenSize: pick(5, parent.hiddenSize),
		mambaNumHeads: parent.mambaNumHeads.map((heads) => pick(2, heads, 2)),
		moeFfnHiddenSize: parent.moeFfnHiddenSize.map((width) => pick(1, width)),
		numMoeExperts: parent.numMoeExperts.map((experts) => pick(2, experts)),
		numAttentionHeads: parent.numAttentionHeads.map((heads) => pick(2, heads, 2)),
		keptLayers: keptLayers.includes(true) ? keptLayers : parent.keptLayers,
	};
}

/** Relative distance of the logits of a submodel cut out from those of the masked parent. */
function distance(c: TrainingConfiguration, parent: ValueStore, submodel: Submodel): number {
	const config = hybridConfig(c);
	using masked = new HybridModel(device, maskedConfig(config, submodel), { frozen: true });
	loadModel(masked, maskedWeights(parent, config, submodel));
	maskExperts(masked, submodel);
	const cut = new SelectedStore(parent, selectionsOf(parent, c, unitsOfSubmodel(c, submodel)));
	using child = new HybridModel(device, hybridConfig({ ...c, ...submodelKeys(c, submodel) }), { frozen: true });
	loadModel(child, cut);
	return relativeRms(logitsOf(child), logitsOf(masked));
}

describe.each(Object.entries(parents))("%s", (_, changes) => {
	test("50 submodels of random sizes in every layer equal their masked parents to 1e-5", () => {
		const c = configurationOf({ ...parentModel, ...changes });
		const config = hybridConfig(c);
		using whole = new HybridModel(device, config, { frozen: true });
		whole.initialise(5);
		for (const { name, value } of whole.logicalTensors()) {
			if (!name.includes(".bias")) continue;
			using drawn = Tensor.from(device, randomValues(value.elements, value.elements, 0.3), value.shape);
			device.copy(value, drawn, drawn.bytes);
		}
		for (const { expertBias } of whole.routers.values()) {
			using drawn = Tensor.from(device, randomValues(6, 3, 0.05), [6]);
			device.copy(expertBias, drawn, drawn.bytes);
		}
		using parent = new ValueStore("parent", whole);
		const worst = Array.from({ length: 50 }, (_, seed) => {
			const submodel = randomSubmodel(parentSubmodel(config), seed + 1);
			return distance(c, parent, submodel);
		});
		expect(Math.max(...worst)).toBeLessThan(1e-5);
		// The parent itself is its own submodel, to the bit.
		const cut = new SelectedStore(parent, selectionsOf(parent, c, unitsOfSubmodel(c, parentSubmodel(config))));
		for (const name of parent.tensors.keys()) expect(readTensor(cut, name)).toEqual(readTensor(parent, name));
	}, 120_000);
});

test("without one of the rules a submodel is another", () => {
	const c = configurationOf(parentModel);
	const config = hybridConfig(c);
	using whole = new HybridModel(device, config, { frozen: true });
	whole.initialise(5);
	using parent = new ValueStore("parent", whole);
	const submodel = { ...parentSubmodel(config), hiddenSize: 20, mambaNumHeads: [4, 4, 4] };
	expect(distance(c, parent, submodel)).toBeLessThan(1e-5);
	// Heads of one group alone, as cutting without a thought of groups gives.
	const units = unitsOfSubmodel(c, submodel);
	const first = Uint32Array.of(0, 1, 2, 3);
	const careless = {
		...units,
		layers: units.layers.map((layer) => layer && { ...layer, mambaHeads: layer.mambaHeads && first }),
	};
	const cut = new SelectedStore(parent, selectionsOf(parent, c, careless));
	const right = new SelectedStore(parent, selectionsOf(parent, c, units));
	using one = new HybridModel(device, hybridConfig({ ...c, ...submodelKeys(c, submodel) }), { frozen: true });
	loadModel(one, cut);
	const wrong = logitsOf(one);
	loadModel(one, right);
	expect(relativeRms(wrong, logitsOf(one))).toBeGreaterThan(0.01);
});

describe("choices", () => {
	const parent = hybridConfig(configurationOf(parentModel));
	const read = (choice: unknown) => choiceOf(choice, parent, "choice.yaml");

	test("a size for all layers, or one for each, and what is not named stays", () => {
		const submodel = read({ "hidden-size": 20, "mamba-num-heads": [8, 4, 2], num_experts: 4, "drop-layers": [6] });
		expect(submodel).toEqual({
			...parentSubmodel(parent),
			hiddenSize: 20,
			mambaNumHeads: [8, 4, 2],
			numMoeExperts: [4, 4, 4],
			keptLayers: [true, true, true, true, true, true, false, true, true],
		});
		const written = formatChoice(submodel, parent);
		expect(written).toEqual({ "hidden-size": 20, "mamba-num-heads": [8, 4, 2], "num-experts": 4, "drop-layers": [6] });
		expect(read(written)).toEqual(submodel);
		expect(formatChoice(parentSubmodel(parent), parent)).toEqual({});
	});

	test.each<[unknown, string]>([
		[{ "hidden-size": 64 }, "hidden-size is 64, larger than the parent's 32"],
		[{ "mamba-num-heads": 3 }, "mamba-num-heads is 3, no multiple of mamba-num-groups (2)"],
		[{ "num-attention-heads": [4, 5] }, "num-attention-heads is 5, no multiple of num-query-groups (2)"],
		[{ "mamba-num-heads": [4, 4] }, "mamba-num-heads has 2 sizes, and the parent has 3 layers M"],
		[{ "num-experts": 1 }, "num-experts is 1, fewer than moe-router-topk (2)"],
		[{ "moe-ffn-hidden-size": 0 }, "moe-ffn-hidden-size is 0; a size is a whole number from 1"],
		[
			{ "num-expert": 4 },
			"there is no axis num-expert; the nearest is num-experts; the axes are hidden-size, mamba-num-heads, num-attention-heads, num-experts, moe-ffn-hidden-size, drop-layers",
		],
		[{ "drop-layers": [9] }, "drop-layers has 9; the parent's layers are 0 to 8"],
		[{ "drop-layers": [1, 1] }, "drop-layers has 1 twice"],
		[{ "drop-layers": [0, 1, 2, 3, 4, 5, 6, 7, 8] }, "drop-layers leaves no layer"],
		[
			[],
			"a choice is a list of `key: size`, of hidden-size, mamba-num-heads, num-attention-heads, num-experts, moe-ffn-hidden-size, drop-layers",
		],
	])("%j is refused", (choice, sentence) => {
		expect(() => read(choice)).toThrow(`choice.yaml: ${sentence}.`);
	});
});

test("a pattern without some layers keeps its groups and MTP depths", () => {
	const kept = (text: string) => [...text].map((one) => one === "1");
	expect(patternOf("M[ME]|*E/ME", kept("11111"))).toBe("M[ME]*E/ME");
	expect(patternOf("M[ME]|*E/ME", kept("10101"))).toBe("MEE/ME");
	expect(patternOf("[ME][*E]", kept("0011"))).toBe("[*E]");
});

test("selected rows and columns are read from any byte on", () => {
	const values = randomValues(5 * 7, 4);
	const store = memoryStore({ w: { shape: [5, 7], values } });
	const [rows, columns] = [Uint32Array.of(4, 0, 1, 2), Uint32Array.of(6, 1, 2, 0)];
	const selected = new SelectedStore(store, new Map([["v", { source: "w", rows, columns }]]));
	expect(selected.tensors.get("v")).toEqual({ dtype: "F32", shape: [4, 4] });
	const expected = Float32Array.from(
		[...rows].flatMap((row) => [...columns].map((column) => values[row * 7 + column]!)),
	);
	expect(readTensor(selected, "v")).toEqual(expected);
	const all = new Uint8Array(expected.buffer);
	for (const [offset, length] of [
		[0, 3],
		[5, 20],
		[17, 47],
		[60, 4],
	] as const) {
		const part = new Uint8Array(length);
		selected.readInto("v", offset, part);
		expect(part).toEqual(all.subarray(offset, offset + length));
	}
	expect(
		() => new SelectedStore(store, new Map([["v", { source: "w", rows: Uint32Array.of(5), columns: null }]])),
	).toThrow("A selection reaches past the shape [5,7] of w.");
});
