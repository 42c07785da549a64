import { detectSpelling } from "../../../src/checkpoint/hf/language-names.ts";
import { LayerScaledStore } from "../../../src/checkpoint/hf/layer-scale.ts";
import { isLeftOut } from "../../../src/checkpoint/hf/left-out.ts";
import { detectTower, visionFromHuggingFace, visionToHuggingFace } from "../../../src/checkpoint/hf/vision-names.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { parseSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { selectTensors } from "../../../src/checkpoint/store.ts";
import { MemoryFile } from "../memory-file.ts";
import { type FuzzParser, inputName } from "../parser.ts";
import { safetensorsBytes, withHeaderLength } from "../safetensors-bytes.ts";
import { shapesStore } from "../shapes-store.ts";

const width = 4;
const [published, own] = ["vision_model.radio_model.model.", "radio."];

export default {
	about: "names and shapes of a RADIO tower in a Hugging Face folder, and the plan of its tensors",
	open: () => ({
		seeds: [
			safetensorsBytes({
				[`${published}patch_generator.cls_token.token`]: [3, width],
				[`${published}patch_generator.embedder.weight`]: [width, 2],
				[`${published}blocks.0.attn.qkv.weight`]: [3 * width, width],
				[`${published}blocks.0.attn.proj.bias`]: [width],
				"mlp1.0.weight": [2],
			}),
			safetensorsBytes({
				[`${own}embeddings.cls_register_token`]: [1, 3, width],
				[`${own}embeddings.patch_projection.weight`]: [width, 2],
				[`${own}encoder.layer.0.attention.attention.query.bias`]: [width],
				[`${own}encoder.layer.0.attention.attention.key.bias`]: [width],
				[`${own}encoder.layer.0.attention.attention.value.bias`]: [width],
				[`${own}encoder.layer.0.layer_scale2.lambda1`]: [width],
				[`${own}encoder.layer.0.mlp.fc2.weight`]: [width, 2],
			}),
		],
		dictionary: ["attn.qkv.bias", "layer_scale1.lambda1", "summary_idxs", "blocks.1.", "[12]", "[0]", '"shape":[]'],
		repair: withHeaderLength,
		parse: (bytes) => {
			const { tensors } = parseSafetensors(new MemoryFile(bytes));
			const tower = detectTower(tensors.keys());
			if (detectSpelling(tensors.keys()) !== null || tower === null) return;
			const store = new LayerScaledStore(selectTensors(shapesStore(tensors), (name) => !isLeftOut(name)));
			const builder = new CorrespondenceBuilder(inputName);
			visionFromHuggingFace(builder, store.tensors, tower, 2, inputName);
			const logical = new MappedStore(store, planTensors(store, builder, "logical"));
			visionToHuggingFace(new CorrespondenceBuilder(inputName), logical.tensors, 2, inputName);
		},
	}),
} satisfies FuzzParser;
