import { fromLayout } from "../../../src/checkpoint/conversion/layouts.ts";
import { tensorBytes } from "../../../src/checkpoint/dtype.ts";
import {
	canonicalLayout,
	formatManifest,
	type Manifest,
	type NativeLayout,
	type NativeTensor,
	parseManifest,
} from "../../../src/checkpoint/native/manifest.ts";
import { readRecord } from "../../../src/checkpoint/training/record.ts";
import { indexLimits, jsonText } from "../../../src/system/json.ts";
import { type FuzzParser, inputName } from "../parser.ts";
import { shapesStore } from "../shapes-store.ts";

const sha256 = "0123456789abcdef".repeat(4);

/** A tensor in two boxes of rows, or in one. */
function tensor(name: string, shape: readonly number[]): NativeTensor {
	const rows = shape[0]! > 1 ? [Math.floor(shape[0]! / 2), Math.ceil(shape[0]! / 2)] : [shape[0]!];
	const zeros = shape.slice(1).map(() => 0);
	const chunks = rows.map((count, i) => ({
		file: `data/r0000${i}-000.safetensors`,
		name: `${name}@${i}`,
		offsets: [i === 0 ? 0 : rows[0]!, ...zeros],
		sizes: [count, ...shape.slice(1)],
		sha256,
	}));
	return { dtype: "F32", shape, chunks };
}

function manifest(shapes: Readonly<Record<string, readonly number[]>>, layout: NativeLayout): Uint8Array {
	const file = { bytes: 4096, headerSha256: sha256 };
	const whole: Manifest = {
		format: "mimo-native",
		version: 1,
		iteration: 12,
		created: "2026-01-01T00:00:00Z",
		generator: "mimo",
		model: { hiddenSize: 8, hybridLayerPattern: "ME*-" },
		layout,
		source: {},
		files: { "data/r00000-000.safetensors": file, "data/r00001-000.safetensors": file, "objects.safetensors": file },
		tensors: Object.fromEntries(Object.entries(shapes).map(([name, shape]) => [name, tensor(name, shape)])),
		objects: { "data.json": { bytes: 12, encoding: "json", sha256 } },
		common: {
			training: {
				iteration: 12,
				consumedSamples: 24,
				scheduledSamples: 24,
				consumedValidSamples: 0,
				optimizerSteps: 12,
				globalBatchSize: 2,
			},
			schedules: { learningRate: { style: "cosine", maximum: 0.001 }, weightDecay: { style: "constant" } },
			rng: { seed: 1 },
			participation: "exact",
			topology: {},
			optimizer: { paramGroups: {} },
		},
	};
	return new TextEncoder().encode(formatManifest(whole));
}

const layers = "language_model.decoder.layers.";

export default {
	about: "index.json of a native checkpoint, and the plan of its layout",
	open: () => ({
		json: true,
		seeds: [
			manifest({ [`${layers}0.mixer.D`]: [4], "language_model.output_layer.weight": [6, 2] }, canonicalLayout),
			manifest(
				{
					[`${layers}0.mixer.norm.weight`]: [4],
					[`${layers}1.self_attention.linear_proj.weight`]: [4, 4],
					[`${layers}1.mlp.experts.linear_fc1.weight`]: [2, 8, 3],
					[`${layers}1.mlp.experts.linear_fc2.weight`]: [2, 3, 4],
				},
				{
					layerNames: "logical",
					experts: "grouped",
					glu: { experts: 2, sharedExperts: 2 },
					pattern: "M[*E]",
				},
			),
		],
		dictionary: ['"grouped"', '"logical"', '"pattern":"[ME]"', '"sizes":[0]', '"BF16"', "experts.linear_fc1.weight"],
		parse: (bytes) => {
			const manifest = parseManifest(jsonText(bytes, inputName, indexLimits), inputName);
			for (const { dtype, shape } of Object.values(manifest.tensors)) {
				if (tensorBytes(dtype, shape) === null) throw new Error(`[${shape}] was accepted.`);
			}
			const store = shapesStore(new Map(Object.entries(manifest.tensors)));
			fromLayout(store, { ...manifest.layout, gluTensorParallel: 1 }, inputName);
			readRecord(manifest, inputName);
		},
	}),
} satisfies FuzzParser;
