import { languageCorrespondence } from "../../../src/checkpoint/hf/families/index.ts";
import { requireCounts, spellings } from "../../../src/checkpoint/hf/families/nemotron-h-names.ts";
import { parsePythonJson } from "../../../src/checkpoint/hf/json.ts";
import { languageConfig } from "../../../src/checkpoint/hf/parts.ts";
import { planTensors } from "../../../src/checkpoint/mapping.ts";
import type { TensorType } from "../../../src/checkpoint/store.ts";
import { configLimits, jsonText } from "../../../src/system/json.ts";
import { type FuzzParser, inputName } from "../parser.ts";
import { shapesStore } from "../shapes-store.ts";

const config = {
	model_type: "nemotron_h",
	hidden_size: 4,
	intermediate_size: 6,
	num_attention_heads: 2,
	num_key_value_heads: 1,
	head_dim: 2,
	vocab_size: 5,
	mamba_num_heads: 2,
	mamba_head_dim: 2,
	n_groups: 1,
	ssm_state_size: 2,
	n_routed_experts: 2,
	num_experts_per_tok: 2,
	moe_intermediate_size: 3,
	moe_shared_expert_intermediate_size: 3,
	hybrid_override_pattern: "ME*-",
	num_hidden_layers: 4,
	time_step_limit: [0, { __float__: "Infinity" }],
	tie_word_embeddings: false,
};
const { hybrid_override_pattern: _, num_hidden_layers: __, ...listed } = config;

export default {
	about: "config.json of a NemotronH folder, and the plan of its tensors",
	open: () => {
		const configuration = languageConfig(parsePythonJson(JSON.stringify(config), inputName), inputName, 0)!;
		const folders = [spellings.published, spellings.transformers].map((spelling) => {
			const { foreign } = languageCorrespondence(configuration, spelling, inputName);
			const tensors = new Map(
				[...foreign].map(([name, shape]): [string, TensorType] => [name, { dtype: "F32", shape }]),
			);
			return { spelling, store: shapesStore(tensors) };
		});
		return {
			json: true,
			seeds: [
				config,
				{ model_type: "vlm", text_config: config, vision_config: { num_attention_heads: 2 } },
				{ ...listed, layers_block_type: ["mamba", "moe", "attention", "mlp"] },
			].map((value) => Buffer.from(JSON.stringify(value))),
			dictionary: [
				"Infinity",
				"NaN",
				"-Infinity",
				'"n_routed_experts":',
				'"mamba_n_groups":',
				'"llm_config":',
				"MEMEM*-",
			],
			parse: (bytes) => {
				const json = parsePythonJson(jsonText(bytes, inputName, configLimits), inputName);
				const read = languageConfig(json, inputName, 0);
				if (read === null) return;
				for (const { spelling, store } of folders) {
					requireCounts(read, spelling, store.tensors, inputName);
					planTensors(store, languageCorrespondence(read, spelling, inputName), "logical");
				}
			},
		};
	},
} satisfies FuzzParser;
