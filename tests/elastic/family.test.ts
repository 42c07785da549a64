/** What a router chooses for a budget is extracted as a model that computes what the parent does under those masks. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { loadModel, ValueStore } from "../../src/checkpoint/model-store.ts";
import { SelectedStore } from "../../src/checkpoint/selected-store.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { DeviceInput } from "../../src/data/device-input.ts";
import { ElasticRouter } from "../../src/elastic/elastic-router.ts";
import { submodelOfBudget } from "../../src/elastic/family.ts";
import { budgetRecords } from "../../src/elastic/family-records.ts";
import { elasticConfig } from "../../src/elastic/from-configuration.ts";
import { withoutNoise } from "../../src/elastic/router-network.ts";
import { submodelKeys, unitsOfSubmodel } from "../../src/elastic/submodel-configuration.ts";
import { selectionsOf } from "../../src/elastic/units.ts";
import { parametersOf } from "../../src/models/hybrid/counts.ts";
import { hybridConfig } from "../../src/models/hybrid/from-configuration.ts";
import type { ModelMasks } from "../../src/models/hybrid/masks.ts";
import { HybridModel } from "../../src/models/hybrid/model.ts";
import type { Device } from "../../src/native/device.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { TokenSlice } from "../../src/tensor/token-slice.ts";
import { smallModel } from "../models/small.ts";
import { relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const c = configurationOf({
	...smallModel,
	"hybrid-layer-pattern": "MEM*EM-E*",
	"mamba-num-heads": 8,
	"mamba-num-groups": 2,
	"num-attention-heads": 8,
	"num-query-groups": 2,
	"num-experts": 6,
	"moe-router-topk": 2,
	"moe-router-bias-update-rate": 0,
	"init-method-std": 0.3,
	flextron: true,
	"enable-router": true,
	"emb-int-list": [32, 27, 20, 12],
	"mamba-int-list": [8, 6, 4, 2],
	"mlp-int-list": [24, 17, 8, 3],
	"moe-expert-int-list": [6, 5, 3, 2],
	"head-int-list": [8, 6, 4, 2],
	"flex-hetero-mamba": true,
	"flex-hetero-ffn": true,
	"flex-hetero-moe-expert": true,
	"flex-hetero-head": true,
	"add-skipping": true,
	"layer-ranking-list": [6, 3, 1],
	"budget-list": [1, 0.7, 0.5],
	"router-std": 1,
});
const model = hybridConfig(c);
const config = elasticConfig(c, model, 10)!;

const tokens = 40;
const ids = Int32Array.from({ length: tokens }, (_, t) => (7 * t + ((t * t) % 13)) % 61);

function logitsOf(one: HybridModel, masks: ModelMasks | undefined): Float32Array {
	const text = { ids, labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths: [25, 15] };
	using input = new DeviceInput(device, text, one.parallel.tp);
	const forward = { ...input.forward(0, TokenSlice.of(0, tokens)), masks };
	using logits = one.stages[0]!.forward(new Tape(device, { recording: false }), forward, null);
	const values = logits.toFloat32();
	return values.filter((_, i) => i % logits.width < 61);
}

test("100 random choices over all axes: the masked parent's logits to 1e-5", () => {
	using parent = new HybridModel(device, model, { frozen: true });
	parent.initialise(5);
	using store = new ValueStore("parent", parent);
	const seen = new Set<string>();
	const worst = Array.from({ length: 25 }, (_, seed) => {
		using router = new ElasticRouter(config, parent);
		router.initialise(seed);
		const trained = { config, weights: router.weights() };
		return [1, 0.85, 0.7, 0.5].map((budget) => {
			const submodel = submodelOfBudget(trained, model, budget);
			seen.add(JSON.stringify(submodel));
			using sampled = router.sample([withoutNoise({ value: budget, parent: budget === 1 })], 9, { trains: false });
			const masked = logitsOf(parent, sampled.microbatches[0]!.masks);
			const keys = submodelKeys(c, submodel);
			using child = new HybridModel(device, hybridConfig({ ...c, ...keys }), { frozen: true });
			loadModel(child, new SelectedStore(store, selectionsOf(store, c, unitsOfSubmodel(c, submodel))));
			return relativeRms(logitsOf(child, undefined), masked);
		});
	});
	expect(Math.max(...worst.flat())).toBeLessThan(1e-5);
	expect(seen.size).toBeGreaterThan(90);
}, 120_000);

test("a family's records count what the extracted models have", () => {
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
