import { detectSpelling } from "../../../src/checkpoint/hf/families/index.ts";
import { LayerScaledStore } from "../../../src/checkpoint/hf/layer-scale.ts";
import { addProjector, detectProjector } from "../../../src/checkpoint/hf/projector-names.ts";
import { isLeftOut } from "../../../src/checkpoint/hf/unused-tensors.ts";
import { projectorSizes, towerConfiguration, towerOfLogical } from "../../../src/checkpoint/hf/vision-configuration.ts";
import { addTower, detectTower } from "../../../src/checkpoint/hf/vision-names.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { parseSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { selectTensors } from "../../../src/checkpoint/store.ts";
import { MemoryFile } from "../memory-file.ts";
import { type FuzzParser, inputName } from "../parser.ts";
import { safetensorsBytes, withHeaderLength } from "../safetensors-bytes.ts";
import { shapesStore } from "../shapes-store.ts";

const width = 4;
const [published, own] = ["vision_model.radio_model.model.", "radio."];

/** Tensors of a block under a prefix, but for its attention. */
const block = (prefix: string, projection: string) => ({
	...Object.fromEntries(
		["norm1", "norm2"].flatMap((norm) => ["weight", "bias"].map((kind) => [`${prefix}${norm}.${kind}`, [width]])),
	),
	[`${prefix}${projection}.weight`]: [width, width],
	[`${prefix}${projection}.bias`]: [width],
	[`${prefix}mlp.fc1.weight`]: [2, width],
	[`${prefix}mlp.fc1.bias`]: [2],
	[`${prefix}mlp.fc2.weight`]: [width, 2],
	[`${prefix}mlp.fc2.bias`]: [width],
});

export default {
	about: "names and shapes of a RADIO tower and a projector in a Hugging Face folder, and the plan of their tensors",
	open: () => ({
		seeds: [
			safetensorsBytes({
				[`${published}patch_generator.cls_token.token`]: [3, width],
				[`${published}patch_generator.pos_embed`]: [1, 4, width],
				[`${published}patch_generator.embedder.weight`]: [width, 12],
				[`${published}blocks.0.attn.qkv.weight`]: [3 * width, width],
				[`${published}blocks.0.attn.qkv.bias`]: [3 * width],
				...block(`${published}blocks.0.`, "attn.proj"),
				"mlp1.0.weight": [width],
				"mlp1.1.weight": [2, width],
				"mlp1.3.weight": [2, 2],
			}),
			safetensorsBytes({
				[`${own}embeddings.cls_register_token`]: [1, 3, width],
				[`${own}embeddings.position_embedding`]: [1, 4, width],
				[`${own}embeddings.patch_projection.weight`]: [width, 12],
				...Object.fromEntries(
					["query", "key", "value"].flatMap((part) => [
						[`${own}encoder.layer.0.attention.attention.${part}.weight`, [width, width]],
						[`${own}encoder.layer.0.attention.attention.${part}.bias`, [width]],
					]),
				),
				...block(`${own}encoder.layer.0.`, "attention.output.dense"),
				[`${own}encoder.layer.0.layer_scale2.lambda1`]: [width],
			}),
		],
		dictionary: ["attn.qkv.bias", "layer_scale1.lambda1", "summary_idxs", "blocks.1.", "[12]", "[0]", '"shape":[]'],
		repair: withHeaderLength,
		parse: (bytes) => {
			const { tensors } = parseSafetensors(new MemoryFile(bytes));
			const spelling = detectTower(tensors);
			if (detectSpelling(tensors.keys()) !== null || spelling === null) return;
			const store = new LayerScaledStore(selectTensors(shapesStore(tensors), (name) => !isLeftOut(name)));
			const builder = new CorrespondenceBuilder(inputName);
			const names = { flag: 2, path: inputName, folder: inputName };
			addTower(builder, towerConfiguration({}, store.tensors, spelling, names), spelling, inputName);
			const style = detectProjector(store.tensors);
			if (style !== null) addProjector(builder, projectorSizes(store.tensors, style, inputName), style);
			const logical = new MappedStore(store, planTensors(store, builder, "logical"));
			addTower(
				new CorrespondenceBuilder(inputName),
				towerOfLogical(logical, { visionNumAttentionHeads: 2 }, inputName)!,
				spelling,
				inputName,
			);
		},
	}),
} satisfies FuzzParser;
