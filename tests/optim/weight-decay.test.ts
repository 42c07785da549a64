/** The parameters of both modules that decay, by name: seen in AdamW's update of weights whose gradient is zero. */

import { expect, test } from "bun:test";
import { ValueStore } from "../../src/checkpoint/model-store.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../src/models/language/model.ts";
import { EncoderModule } from "../../src/models/vision/encoder.ts";
import { encoderConfig } from "../../src/models/vision/from-configuration.ts";
import { visionEncoder } from "../../src/models/vit/tower.ts";
import { Optimizer } from "../../src/optim/optimizer.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { singleReplica } from "../../src/parallel/data-parallel.ts";
import { testDevice } from "../support.ts";

const language = "language_model.";
const vision = "modality_submodules.radio_encoder.";
const tower = `${vision}encoders.radio_encoder.radio_model.`;

/** Vectors and biases, of a Mamba, an MoE, an attention and an MLP layer and of one layer of the tower. */
const kept = [
	`${language}decoder.layers.0.mixer.in_proj.layer_norm_weight`,
	`${language}decoder.layers.0.mixer.conv1d_bias`,
	`${language}decoder.layers.0.mixer.dt_bias`,
	`${language}decoder.layers.0.mixer.A_log`,
	`${language}decoder.layers.0.mixer.D`,
	`${language}decoder.layers.0.mixer.norm.weight`,
	`${language}decoder.layers.1.pre_mlp_layernorm.weight`,
	`${language}decoder.layers.2.self_attention.linear_qkv.layer_norm_weight`,
	`${language}decoder.layers.3.mlp.linear_fc1.layer_norm_weight`,
	`${language}decoder.final_norm.weight`,
	`${tower}decoder.layers.0.self_attention.linear_qkv.layer_norm_weight`,
	`${tower}decoder.layers.0.self_attention.linear_qkv.layer_norm_bias`,
	`${tower}decoder.layers.0.self_attention.linear_qkv.bias`,
	`${tower}decoder.layers.0.self_attention.linear_proj.bias`,
	`${tower}decoder.layers.0.mlp.linear_fc1.layer_norm_weight`,
	`${tower}decoder.layers.0.mlp.linear_fc1.layer_norm_bias`,
	`${tower}decoder.layers.0.mlp.linear_fc1.bias`,
	`${tower}decoder.layers.0.mlp.linear_fc2.bias`,
	`${tower}decoder.final_layernorm.weight`,
	`${tower}decoder.final_layernorm.bias`,
];

/** Everything with more dimensions, the convolution and the router among them. */
const decayed = [
	`${language}embedding.word_embeddings.weight`,
	`${language}decoder.layers.0.mixer.in_proj.weight`,
	`${language}decoder.layers.0.mixer.conv1d_weight`,
	`${language}decoder.layers.0.mixer.out_proj.weight`,
	`${language}decoder.layers.1.mlp.router.weight`,
	...[0, 1].flatMap((expert) => [
		`${language}decoder.layers.1.mlp.experts.linear_fc1.weight${expert}`,
		`${language}decoder.layers.1.mlp.experts.linear_fc2.weight${expert}`,
	]),
	`${language}decoder.layers.1.mlp.shared_experts.linear_fc1.weight`,
	`${language}decoder.layers.1.mlp.shared_experts.linear_fc2.weight`,
	`${language}decoder.layers.2.self_attention.linear_qkv.weight`,
	`${language}decoder.layers.2.self_attention.linear_proj.weight`,
	`${language}decoder.layers.3.mlp.linear_fc1.weight`,
	`${language}decoder.layers.3.mlp.linear_fc2.weight`,
	`${language}output_layer.weight`,
	`${tower}class_token`,
	`${tower}position_embeddings`,
	`${tower}embedder.weight`,
	`${tower}decoder.layers.0.self_attention.linear_qkv.weight`,
	`${tower}decoder.layers.0.self_attention.linear_proj.weight`,
	`${tower}decoder.layers.0.mlp.linear_fc1.weight`,
	`${tower}decoder.layers.0.mlp.linear_fc2.weight`,
];

test("vectors and biases do not decay, everything else does", async () => {
	using device = await testDevice(1);
	const c = configurationOf({
		preset: "nemotron-vlm-tiny",
		"hybrid-layer-pattern": "ME*-",
		"num-experts": 2,
		"vision-num-layers": 1,
		"moe-router-enable-expert-bias": false,
		"vision-projection-type": "affine",
	});
	using encoder = new EncoderModule(device, visionEncoder(encoderConfig(c)), {
		frozenTower: false,
		frozenProjector: false,
	});
	using model = new HybridModel(device, hybridConfig(c), { frozen: false });
	const replicas = [singleReplica(encoder.parameters), singleReplica(model.parameters)];
	for (const { parameters } of replicas) {
		parameters.zeroGradients();
		for (const { values } of parameters.buffers) {
			device.copyToDevice(values, new Float32Array(values.elements).fill(1));
		}
	}
	using scalars = new StepScalars(device);
	using optimizer = new Optimizer(replicas, scalars, { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
	scalars.set("foundInf", 0);
	scalars.set("clipFactor", 1);
	scalars.set("learningRate", 0.5);
	scalars.set("weightDecay", 0.5);
	optimizer.step();
	const values = new Map<string, number>();
	for (const module of [encoder, model]) {
		using store = new ValueStore("the weights", module);
		for (const name of store.tensors.keys()) values.set(name, (readTensor(store, name) as Float32Array)[0]!);
	}
	const names = (wanted: number) => [...values].filter(([, value]) => value === wanted).map(([name]) => name);
	expect(names(1).sort()).toEqual(kept.sort());
	expect(
		names(0.75)
			.filter((name) => !name.includes("projection"))
			.sort(),
	).toEqual(decayed.sort());
	expect(names(0.75).filter((name) => name.includes("projection"))).not.toEqual([]);
	expect(values.size).toBe(names(1).length + names(0.75).length);
});
