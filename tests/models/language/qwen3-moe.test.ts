/** A mixture of gated experts in a hybrid pattern is transformers' Qwen3-MoE block (tests/golden/tools/make_experts.py). */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { configurationOf } from "../../../src/config/resolve.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import type { Device } from "../../../src/native/device.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { randomValues, relativeRms, testDevice } from "../../support.ts";
import { smallModel } from "../small.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const reference: {
	readonly seeds: Readonly<Record<"norm" | "router" | "fc1" | "fc2" | "x", number>>;
	readonly tokens: number;
	readonly y: readonly number[];
} = JSON.parse(readFileSync(join(import.meta.dir, "../../golden/experts/qwen3-moe.json"), "utf8"));

for (const keys of [{}, { "moe-fused-mlp": "off" }, { "moe-mlp-glu-interleave-size": 4 }]) {
	test(`pattern E*, ${JSON.stringify(keys)}`, () => {
		const { seeds, tokens } = reference;
		const c = configurationOf({
			...smallModel,
			"hybrid-layer-pattern": "E*",
			"hidden-size": 16,
			"num-attention-heads": 2,
			"num-query-groups": 1,
			"vocab-size": tokens,
			"num-experts": 6,
			"moe-router-topk": 2,
			"moe-router-score-function": "softmax",
			"moe-router-enable-expert-bias": false,
			"moe-router-topk-scaling-factor": 1,
			"moe-ffn-hidden-size": 12,
			"moe-shared-expert-intermediate-size": 0,
			"squared-relu": false,
			swiglu: true,
			"norm-epsilon": 1e-6,
			...keys,
		});
		using model = new HybridModel(device, hybridConfig(c), { frozen: true });
		model.initialise(1);
		const drawn = (name: keyof typeof seeds, count: number, scale: number) => randomValues(count, seeds[name], scale);
		const fc1 = drawn("fc1", 6 * 24 * 16, 0.3);
		const fc2 = drawn("fc2", 6 * 16 * 12, 0.3);
		const whole: Record<string, Float32Array> = {
			// Token t is row t of x.
			"embedding.word_embeddings.weight": drawn("x", tokens * 16, 1),
			"pre_mlp_layernorm.weight": drawn("norm", 16, 0.2).map((value) => 1 + value),
			"mlp.router.weight": drawn("router", 6 * 16, 0.5),
		};
		for (let e = 0; e < 6; e++) {
			whole[`mlp.experts.linear_fc1.weight${e}`] = fc1.subarray(e * 24 * 16, (e + 1) * 24 * 16);
			whole[`mlp.experts.linear_fc2.weight${e}`] = fc2.subarray(e * 16 * 12, (e + 1) * 16 * 12);
		}
		let filled = 0;
		for (const { name, value, blocks } of model.logicalTensors()) {
			using part = value;
			const own = whole[name.replace(/^language_model\.(decoder\.layers\.0\.)?/, "")];
			if (own === undefined) continue;
			filled++;
			for (const { localRow, fullRow, rows } of blocks) {
				using stretch = part.rowsFrom(localRow, rows);
				device.copyToDevice(stretch, own.slice(fullRow * part.width, (fullRow + rows) * part.width));
			}
		}
		expect(filled).toBe(Object.keys(whole).length);
		const text = {
			ids: Int32Array.from({ length: tokens }, (_, token) => token),
			labels: new Int32Array(tokens),
			lossMask: new Float32Array(tokens),
			lengths: [tokens],
		};
		using input = new DeviceInput(device, text, model.parallel);
		let output: Float32Array = new Float32Array();
		using _ = model.chunks[0]!.forward(
			new Tape(device, { recording: false }),
			input.forward(0, TokenSlice.of(0, tokens)),
			null,
			(name, value) => {
				if (name === "layer.0") output = value.toFloat32();
			},
		);
		expect(relativeRms(output, reference.y)).toBeLessThan(1e-6);
	});
}
