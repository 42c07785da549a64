import { planTensors } from "../../../src/checkpoint/mapping.ts";
import { extraStates, unflatten } from "../../../src/checkpoint/torch-dist/common.ts";
import { readKeys } from "../../../src/checkpoint/torch-dist/keys.ts";
import { parseMetadata } from "../../../src/checkpoint/torch-dist/metadata.ts";
import { writeTorchDistFiles } from "../../../src/checkpoint/torch-dist/writer.ts";
import { type FuzzParser, inputName } from "../parser.ts";
import { shapesStore } from "../shapes-store.ts";
import { withFolder } from "../with-file.ts";

/** The index of a checkpoint of these tensors. */
function metadata(shapes: Readonly<Record<string, readonly number[]>>): Uint8Array {
	return withFolder((folder) => {
		writeTorchDistFiles(
			folder,
			{
				tensors: {
					path: folder,
					tensors: new Map(Object.entries(shapes).map(([name, shape]) => [name, { dtype: "F32", shape }])),
					readInto: (_, __, into) => into.fill(0),
					[Symbol.dispose]: () => {},
				},
				extraStates: new Map([["a._extra_state/shard_0_1", "empty"]]),
				items: new Map(),
				objects: new Map([["rng_state/shard_0_1", new Map([["x", 1]])]]),
				common: new Map([["iteration", 1]]),
			},
			{ sync: false },
		);
		return ".metadata";
	});
}

const opcodes = [..."()].}0NRaeubts\x81\x85\x86\x87\x94"].map((text) => Buffer.from(text, "latin1"));

export default {
	about: ".metadata of a torch_dist checkpoint, and the plan of its keys",
	open: () => ({
		seeds: [
			metadata({
				"language_model.module.decoder.layers.0.mlp.experts.experts.linear_fc1.weight": [2, 3, 4],
				"modality_submodules.radio_encoder.encoders.radio_encoder.radio_model.decoder.layers.mlp.linear_fc2.bias": [
					2, 3,
				],
			}),
			metadata({
				"embedding.word_embeddings.weight": [4, 2],
				"decoder.layers.0.mixer.conv1d.bias.x": [2],
				"decoder.layers.0.mixer.conv1d.bias.B": [1],
				"decoder.layers.0.mixer.conv1d.bias.C": [1],
				"optimizer.state.exp_avg.embedding.word_embeddings.weight": [4, 2],
			}),
		],
		dictionary: [
			...opcodes,
			...[
				"decoder.layers.",
				"mlp.experts.experts.linear_fc1.weight",
				"nd_reformulated_orig_global_shape",
				"mcore_data",
			],
			...["__0_0.distcp", "../x", "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_((torch.float32,"],
		],
		parse: (bytes) => {
			const { tensors, flattened } = parseMetadata(bytes, inputName);
			const whole = unflatten(shapesStore(tensors), flattened);
			const { correspondence, buffers } = readKeys(whole.tensors, inputName);
			if (buffers.length === 0) planTensors(whole, correspondence, "logical");
			extraStates(whole.tensors);
		},
	}),
} satisfies FuzzParser;
