/** The gate of the shared expert against its formula: + σ(w · u) · mlp(u), u being the normed input. */
import { expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { testDevice } from "../../support.ts";
import { smallModel } from "../small.ts";

const ids = [3, 14, 15, 9, 2, 6, 5];
const width = smallModel["hidden-size"];
const experts = "language_model.decoder.layers.0.mlp.shared_experts";

test("the shared expert times the sigmoid of a linear layer", async () => {
	using device = await testDevice();
	/** Values before and after the only layer; weights depend on their names alone. */
	const run = (keys: Readonly<Record<string, unknown>>, { silent = false } = {}) => {
		const c = configurationOf({ ...smallModel, "hybrid-layer-pattern": "E", "init-method-std": 0.5, ...keys });
		using model = new HybridModel(device, hybridConfig(c), { frozen: false });
		model.initialise(3);
		if (silent) {
			const { value } = model.parameters.get(`${experts}.linear_fc2.weight`);
			device.setZero(value, value.bytes);
		}
		const texts = { labels: new Int32Array(ids.length), lossMask: new Float32Array(ids.length), lengths: [ids.length] };
		using input = new DeviceInput(device, { ids: Int32Array.from(ids), ...texts }, model.parallel);
		const seen = new Map<string, Float32Array>();
		const forward = input.forward(0, TokenSlice.of(0, ids.length));
		const observe = (name: string, value: { toFloat32(): Float32Array }) => void seen.set(name, value.toFloat32());
		using _ = model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null, observe);
		const gate = keys["moe-shared-expert-gate"]
			? model.parameters.get(`${experts}.gate_weight`).value.toFloat32()
			: null;
		return { x: seen.get("embedding")!, y: seen.get("layer.0")!, gate };
	};
	const routed = run({}, { silent: true }).y;
	const plain = run({}).y;
	const { x, y, gate } = run({ "moe-shared-expert-gate": true });
	for (let token = 0; token < ids.length; token++) {
		const row = x.subarray(token * width, (token + 1) * width);
		const rms = Math.sqrt(row.reduce((sum, value) => sum + value * value, 0) / width + 1e-5);
		const weight = 1 / (1 + Math.exp(-row.reduce((sum, value, at) => sum + (value / rms) * gate![at]!, 0)));
		for (let at = token * width; at < (token + 1) * width; at++) {
			expect(Math.abs(y[at]! - (routed[at]! + weight * (plain[at]! - routed[at]!)))).toBeLessThan(2e-5);
		}
		expect(Math.abs(weight - 1)).toBeGreaterThan(1e-3);
	}
});
