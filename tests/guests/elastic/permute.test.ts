/** A model whose units are sorted along every axis at once computes what it computed (docs/spec/elastic.md §23). */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { SelectedStore } from "../../../src/checkpoint/store.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { type Importance, unitsOfImportance } from "../../../src/guests/elastic/importance/importance.ts";
import { selectionsOf } from "../../../src/guests/elastic/submodel/units.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import type { Device } from "../../../src/native/device.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { smallModel } from "../../models/small.ts";
import { randomValues, relativeRms, testDevice } from "../../support.ts";
import { text } from "./family-model.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const sizes = {
	...smallModel,
	...{ "hybrid-layer-pattern": "MEM*-E*", "init-method-std": 0.3, "num-experts": 6, "moe-router-topk": 2 },
	...{ "mamba-num-heads": 8, "mamba-num-groups": 2, "num-attention-heads": 8, "num-query-groups": 2 },
} as const;

function logitsOf(model: HybridModel): Float32Array {
	using input = new DeviceInput(device, text.text, model.parallel);
	const forward = input.forward(0, TokenSlice.of(0, text.text.ids.length));
	using logits = model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null);
	return logits.toFloat32();
}

test.each([
	["untied, sigmoid router", {}],
	[
		"tied, rotary positions, softmax router, gated activation",
		{
			...{ "untie-embeddings-and-output-weights": false, "position-embedding-type": "rope" },
			...{
				"moe-router-score-function": "softmax",
				"moe-router-enable-expert-bias": false,
				"squared-relu": false,
				swiglu: true,
			},
		},
	],
])("%s: ten orders of all units give the logits up to the order of sums", (_, changes) => {
	const c = configurationOf({ ...sizes, ...changes });
	const config = hybridConfig(c);
	using model = new HybridModel(device, config, { frozen: true });
	model.initialise(3);
	for (const { expertBias } of model.routers.values()) device.copyToDevice(expertBias, randomValues(6, 9, 0.2));
	const expected = logitsOf(model);
	using store = new ValueStore("parent", model);
	for (let seed = 0; seed < 10; seed++) {
		let drawn = 0;
		const scores = (count: number) => [...randomValues(count, 100 * seed + drawn++)].map((x) => x + 1);
		const importance: Importance = {
			...{ format: "mimo-elastic-importance", version: 1, data: ["drawn"], tokens: 1, pattern: "MEM*-E*" },
			embedding: scores(32),
			layers: config.pattern.map((kind) => ({
				layer: null,
				...((kind === "mamba" || kind === "attention") && { heads: scores(8) }),
				...(kind === "moe" && { experts: scores(6), channels: Array.from({ length: 6 }, () => scores(24)) }),
			})),
		};
		const units = unitsOfImportance(c, importance, "drawn.json");
		const sorted = new SelectedStore(store, selectionsOf(store, c, units));
		using other = new HybridModel(device, config, { frozen: true });
		loadModel(other, sorted);
		expect(relativeRms(logitsOf(other), expected)).toBeLessThan(5e-6);
		expect([...units.hidden!]).not.toEqual([...units.hidden!.keys()]);
	}
});
