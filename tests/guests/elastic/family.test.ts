/** A router's choice for a budget is extracted as a model that computes what the parent does under those masks. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { SelectedStore } from "../../../src/checkpoint/store.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { routerIn } from "../../../src/guests/elastic/elastic.ts";
import { withoutNoise } from "../../../src/guests/elastic/router/network.ts";
import { ElasticRouter } from "../../../src/guests/elastic/router/router.ts";
import { submodelKeys, unitsOfSubmodel } from "../../../src/guests/elastic/submodel/configuration.ts";
import { budgetRecords, submodelOfBudget } from "../../../src/guests/elastic/submodel/family.ts";
import type { Submodel } from "../../../src/guests/elastic/submodel/submodel.ts";
import { selectionsOf } from "../../../src/guests/elastic/submodel/units.ts";
import { parametersOf } from "../../../src/models/language/counts.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import type { ModelMasks } from "../../../src/models/language/masks.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import type { Device } from "../../../src/native/device.ts";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { trainStep } from "../../../src/train/step.ts";
import { Scratch } from "../../data/fixtures.ts";
import { runRanks } from "../../parallel/ranks.ts";
import { relativeRms, testDevice } from "../../support.ts";
import {
	budgets,
	byLayer,
	expertBias,
	type Family,
	familyOf,
	parentSeed,
	softMasks,
	text,
	vocabulary,
} from "./family-model.ts";
import { openFamily } from "./family-run.ts";

const folder = new Scratch();
let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => {
	device[Symbol.dispose]();
	folder[Symbol.dispose]();
});

const limit = 1e-5;
const tokens = text.text.ids.length;

function logitsOf(one: HybridModel, masks?: ModelMasks): Float32Array {
	using input = new DeviceInput(device, text.text, one.parallel);
	const forward = { ...input.forward(0, TokenSlice.of(0, tokens)), masks };
	using logits = one.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null);
	return live(logits.toFloat32(), logits.width);
}

/** Without the vocabulary's padding. */
function live(values: Float32Array, width: number): Float32Array {
	return values.filter((_, i) => i % width < vocabulary);
}

function logitsOfChild({ c }: Family, store: ValueStore, submodel: Submodel): Float32Array {
	using child = new HybridModel(device, hybridConfig({ ...c, ...submodelKeys(c, submodel) }), { frozen: true });
	loadModel(child, new SelectedStore(store, selectionsOf(store, c, unitsOfSubmodel(c, submodel))));
	return logitsOf(child);
}

/**
 * Logits of every extracted submodel, those of routers of so many seeds; `use` is given each with its masked parent's.
 * Returns how many submodels differ.
 */
function eachChoice(
	family: Family,
	seeds: number,
	use: (child: Float32Array, masked: () => Float32Array) => void,
): number {
	const { model, elastic: config } = family;
	using parent = new HybridModel(device, model, { frozen: true });
	parent.initialise(parentSeed);
	for (const router of parent.routers.values()) device.copyToDevice(router.expertBias, expertBias);
	using store = new ValueStore("parent", parent);
	const seen = new Set<string>();
	const own = budgets.filter((budget) => budget >= Math.min(...config.budgets));
	for (let seed = 0; seed < seeds; seed++) {
		using router = new ElasticRouter(config, parent);
		router.initialise(seed);
		for (const value of own) {
			const submodel = submodelOfBudget({ config, weights: router.weights() }, model, value);
			seen.add(JSON.stringify(submodel));
			using sampled = router.sample([withoutNoise({ value, parent: value === 1 })], 9, { trains: false });
			use(logitsOfChild(family, store, submodel), () => logitsOf(parent, sampled.microbatches[0]!.masks));
		}
	}
	return seen.size;
}

describe("the masked parent's logits to 1e-5 of rms, over all axes", () => {
	test.each([
		["a choice for every layer", 25, byLayer],
		["one choice for all layers", 25, {}],
		["one-hot samples of soft masks", 5, { ...byLayer, ...softMasks }],
	])("%s: %d routers at 4 budgets", (_, seeds, keys) => {
		const worst: number[] = [];
		const different = eachChoice(familyOf(keys), seeds, (child, masked) => worst.push(relativeRms(child, masked())));
		expect(different).toBeGreaterThan(0.85 * seeds * budgets.length);
		expect(Math.max(...worst)).toBeLessThan(limit);
	});

	test.each([
		["M", { "mamba-int-list": [8, 6, 4, 2] }],
		["E", { "mlp-int-list": [24, 17, 8, 3], "moe-expert-int-list": [6, 5, 3, 2] }],
		["*", { "head-int-list": [8, 6, 4, 2] }],
		["-", {}],
	])("a layer %s alone", (pattern, lists) => {
		const none = Object.fromEntries(["mamba", "mlp", "moe-expert", "head"].map((axis) => [`${axis}-int-list`, null]));
		const keys = { ...none, ...lists, "add-skipping": false, "layer-ranking-list": null, "budget-list": [1, 0.85] };
		const worst: number[] = [];
		eachChoice(familyOf({ ...keys, "hybrid-layer-pattern": pattern }), 5, (child, masked) =>
			worst.push(relativeRms(child, masked())),
		);
		expect(Math.max(...worst)).toBeLessThan(limit);
	});

	const cut = { ...byLayer, "hybrid-layer-pattern": "MEM*|EM-E*" };
	const fourGroups = {
		...byLayer,
		...{ "mamba-num-groups": 4, "num-query-groups": 4, "mamba-int-list": [8, 4], "head-int-list": [8, 4] },
	};
	const full = process.env.MIMO_TEST_FULL === "1";
	test.each([
		["tp2", byLayer],
		["tp2ep2", {}],
		["dp2ep2", byLayer],
		["pp2", cut],
		["tp2pp2", { ...cut, ...softMasks }],
		["tp4", fourGroups],
	])(
		"parents on %s",
		async (layout, keys) => {
			const seeds = full || layout === "tp2" ? 25 : 4;
			const { topology } = namedTopology(parseLayout(layout));
			const output = `${folder.path}/${layout}`;
			const args = [layout, JSON.stringify(keys), String(seeds), output];
			const outcomes = await runRanks("../guests/elastic/family-rank.ts", topology.worldSize, args);
			for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
			const { tensor, pipeline } = topology.language.shape;
			const parts = Array.from({ length: tensor }, (_, tp) => {
				const rank = topology.language.lane(0, pipeline - 1)[tp]!;
				return new Float32Array(readFileSync(`${output}.${rank}`).buffer);
			});
			const worst: number[] = [];
			eachChoice(familyOf(keys), seeds, (child) => {
				const columns = parts[0]!.length / (seeds * budgets.length * tokens);
				const first = worst.length * tokens;
				const masked = Float32Array.from({ length: tokens * vocabulary }, (_, i) => {
					const [token, column] = [Math.floor(i / vocabulary), i % vocabulary];
					return parts[Math.floor(column / columns)]![(first + token) * columns + (column % columns)]!;
				});
				worst.push(relativeRms(child, masked));
			});
			expect(Math.max(...worst)).toBeLessThan(limit);
		},
		120_000,
	);

	test("choices of a trained router", async () => {
		const family = familyOf({ ...byLayer, "lr-mult-router": 10, "init-method-std": 0.1 });
		const { model, elastic } = family;
		using run = await openFamily(family, device, { clipGrad: 1 });
		const before = JSON.stringify([...routerIn(run.guests)!.weights().values()].map(({ second }) => [...second]));
		for (let iteration = 0; iteration < 20; iteration++)
			trainStep(run.state, { microbatches: [text], iteration, learningRate: 3e-3, weightDecay: 0 });
		const weights = routerIn(run.guests)!.weights();
		expect(JSON.stringify([...weights.values()].map(({ second }) => [...second]))).not.toBe(before);
		using store = new ValueStore("parent", run.language!);
		for (const value of budgets) {
			using sampled = routerIn(run.guests)!.sample([withoutNoise({ value, parent: value === 1 })], 9, {
				trains: false,
			});
			const masked = logitsOf(run.language!, sampled.microbatches[0]!.masks);
			const child = logitsOfChild(family, store, submodelOfBudget({ config: elastic, weights }, model, value));
			expect(relativeRms(child, masked)).toBeLessThan(limit);
		}
	});
});

test("masks stand in the layers of their kind, and where there is a choice", () => {
	const kinds = ({ model, elastic }: Family) => {
		using parent = new HybridModel(device, model, { frozen: true });
		using router = new ElasticRouter(elastic, parent);
		using sampled = router.sample([withoutNoise({ value: 1, parent: true })], 0, { trains: false });
		const { hidden, norm, layer } = sampled.microbatches[0]!.masks;
		const layers = model.pattern.map((kind, index) => {
			const own = Object.entries(layer(index)).filter(([, mask]) => mask !== null);
			return [kind, ...own.map(([name]) => name)].join(" ");
		});
		return { whole: [hidden !== null, norm !== null], layers };
	};
	expect(kinds(familyOf({ "hybrid-layer-pattern": "M*E-ME", "layer-ranking-list": [3] }))).toEqual({
		whole: [true, true],
		layers: ["mamba mamba", "attention attention", "moe moe", "mlp keep", "mamba mamba", "moe moe"],
	});
	const { layers } = kinds(
		familyOf({ "emb-int-list": null, "mamba-int-list": [8], "head-int-list": null, "budget-list": [1] }),
	);
	expect(layers.filter((one) => /^(mamba|attention)/.test(one))).toEqual([
		...["mamba", "mamba", "attention keep", "mamba", "attention"],
	]);
});

test.each([
	["hard", byLayer],
	["soft", { ...byLayer, ...softMasks }],
])("with %s masks the parent's own choice is the parent without masks, bit for bit", (_, keys) => {
	const { model, elastic } = familyOf(keys);
	using parent = new HybridModel(device, model, { frozen: true });
	parent.initialise(parentSeed);
	using router = new ElasticRouter(elastic, parent);
	router.initialise(1);
	const noise = ({ sizes, layers }: { sizes: readonly number[]; layers: readonly number[] | null }) =>
		Float64Array.from({ length: (layers?.length ?? 1) * sizes.length }, (__, at) =>
			at % sizes.length === 0 ? 1e6 : 0,
		);
	using sampled = router.sample([{ budget: { value: 1, parent: true }, hard: true, noise }], 0, { trains: false });
	expect(logitsOf(parent, sampled.microbatches[0]!.masks)).toEqual(logitsOf(parent));
});

test("a family's records count what the extracted models have", () => {
	const { c, model, elastic: config } = familyOf();
	using parent = new HybridModel(device, model, { frozen: true });
	using router = new ElasticRouter(config, parent);
	router.initialise(3);
	const trained = { config, weights: router.weights() };
	const records = budgetRecords(trained, model, { "lm loss (budget 0.7)": 2.5 });
	expect(records.map(({ budget, loss }) => [budget, loss])).toEqual([
		[1, null],
		[0.7, 2.5],
		[0.5, null],
	]);
	for (const { budget, total, sizes } of records) {
		const submodel = submodelOfBudget(trained, model, budget);
		const child = hybridConfig({ ...c, ...submodelKeys(c, submodel) });
		// Elastic counts have the padding of the vocabulary too, and so has the model.
		expect(total).toBe(parametersOf(child).total);
		expect(sizes["hidden-size"]).toBe(submodel.hiddenSize);
		expect(sizes.layers).toBe(submodel.keptLayers.filter((kept) => kept).length);
	}
	expect(() => submodelOfBudget(trained, model, 0.4)).toThrow(
		"The budget 0.4 is none that the router was trained for: allowed is 0.5 to 1.",
	);
});
