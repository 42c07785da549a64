/**
 * Rank program of language.test.ts: trains a small language model for three steps on a given layout, on samples that are
 * the same whatever the layout, and prints losses, norms, gradients of the first step by full name, and weights.
 */
import { createHash } from "node:crypto";
import { gradientsOf, ValueStore } from "../../src/checkpoint/model-store.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { segmentLengths } from "../../src/config/hybrid-pattern.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { nextTokenMicrobatch, withoutImages } from "../../src/data/microbatch.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { segmentsOf } from "../../src/models/language/pipeline-segments.ts";
import { layOut } from "../../src/parallel/topology.ts";
import { World } from "../../src/parallel/world.ts";
import { TokenSlice } from "../../src/tensor/sequences.ts";
import { assemble } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import { divisibleModel } from "../models/small.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

const layout = JSON.parse(process.argv[2]!) as {
	tensor: number;
	data: number;
	expert: number;
	expertTensor: number;
	pipeline: number;
	/** Layers, cut or not; null: those of the small model. */
	pattern: string | null;
	tied: boolean;
	zero: boolean;
	dropout: number;
	/** Further keys of the configuration. */
	keys: Readonly<Record<string, unknown>>;
};
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const { tensor, data, expert, expertTensor, pipeline } = layout;
const topology = layOut([], { tensor, data, pipeline, expert, expertTensor });
const grid = topology.language;
const c = configurationOf({
	...divisibleModel,
	...(layout.pattern === null ? {} : { "hybrid-layer-pattern": layout.pattern }),
	"untie-embeddings-and-output-weights": !layout.tied,
	"llm-tp": layout.tensor,
	"hidden-dropout": layout.dropout,
	"attention-dropout": layout.dropout,
	"moe-router-load-balancing-type": ["seq_aux_loss", "aux_loss"],
	"moe-aux-loss-coeff": [1e-2, 1e-2],
	"moe-z-loss-coeff": 1e-3,
	...layout.keys,
});
const specification = {
	...{ encoders: [], clipGrad: 1, seed: 3, distributedOptimizer: layout.zero },
	language: hybridConfig(c),
	segments: segmentsOf(segmentLengths(c.hybridLayerPattern, pipeline)),
	frozenLanguage: false,
	adam: { beta1: 0.9, beta2: 0.95, epsilon: 1e-6 },
	logNumZeros: true,
	logParametersNorm: true,
};
using run = await assemble(specification, topology, world);
const model = run.language!;
run.initialise(7);

// Eight samples a step in microbatches of two, dealt out to lanes in order.
const perLane = 4 / layout.data;
function sample(step: number, index: number) {
	let state = 1 + step * 8 + index;
	return Int32Array.from({ length: 25 }, () => {
		state = (state * 48271 + 11) % 2147483647;
		return state % 61;
	});
}

const gradients: Record<string, number[]> = {};
const losses: unknown[] = [];
for (let step = 0; step < 3; step++) {
	const lane = grid.coordinates(world.rank).dp;
	const microbatches = Array.from({ length: perLane }, (_, m) =>
		withoutImages(nextTokenMicrobatch([0, 1].map((row) => sample(step, (lane * perLane + m) * 2 + row)))),
	);
	const tokens = TokenSlice.of(lane * perLane * 48, perLane * 48);
	const result = trainStep(
		run.state,
		{ microbatches, tokens, iteration: step, learningRate: 1e-3, weightDecay: 0.1 },
		step === 0
			? {
					// Gradients that are looked at round once more: every layout has them looked at.
					gradients: () => {
						if (layout.zero) return;
						using store = new ValueStore("gradients", gradientsOf(model));
						for (const name of store.tensors.keys()) {
							gradients[name] = [...(readTensor(store, name) as Float32Array)];
						}
					},
				}
			: {},
	);
	losses.push({ ...result, balancingByLayer: [...result.balancingByLayer] });
	world.progress(step);
}
using values = new ValueStore("weights", model);
const digest = createHash("sha256");
for (const name of [...values.tensors.keys()].sort())
	digest.update(name).update(readTensor(values, name) as Float32Array);
const blocks: Record<string, unknown> = {};
for (const tensor of model.logicalTensors()) {
	blocks[tensor.name] = { width: tensor.shape.slice(1).reduce((a, b) => a * b, 1), blocks: tensor.blocks };
	tensor.value[Symbol.dispose]();
	tensor.gradient?.[Symbol.dispose]();
}
console.log(JSON.stringify({ losses, gradients, blocks, weights: digest.digest("hex") }));
