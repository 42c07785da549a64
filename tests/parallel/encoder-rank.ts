/**
 * Rank program of encoder.test.ts: encodes two images tensor-parallel, places their rows at tokens that the ranks share
 * out, goes back from given gradients of the tokens, and prints rows, this rank's tokens and gradients by full name.
 */

import { gradientsOf, ValueStore } from "../../src/checkpoint/model-store.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { EncoderModule } from "../../src/models/vision/encoder.ts";
import { findImagePlaces, placeImageRows, placement } from "../../src/models/vision/merge.ts";
import { visionEncoder } from "../../src/models/vit/tower.ts";
import { noModelParallel } from "../../src/parallel/module-groups.ts";
import { World } from "../../src/parallel/world.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { normedTower, tinyProjector, tinyTower } from "../models/vit/tower.ts";
import { randomValues } from "../support.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

const [type, tower] = process.argv.slice(2) as ["affine" | "mlp", "normed"?];
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const tp = await world.group(
	"encoder.tp",
	Array.from({ length: place.ranks }, (_, rank) => rank),
);
const width = 12;
const config = {
	tower: tower === "normed" ? normedTower : tinyTower,
	projector: { ...tinyProjector(width), type },
};
const options = {
	frozenTower: false,
	frozenProjector: false,
	parallel: { ...noModelParallel("encoder", world.rank), tp, tokens: tp },
};
using encoder = new EncoderModule(device, visionEncoder(config), options);
encoder.initialise(7);
// Biases start at zero; these, which every rank holds, must be added once.
for (const { name, value } of encoder.parameters) {
	if (/linear_(proj|fc2)\.bias$/.test(name)) device.copyToDevice(value, randomValues(value.elements, 4));
}

const grids = [
	{ rows: 4, columns: 4 },
	{ rows: 2, columns: 6 },
];
using patches = Tensor.from(device, randomValues(28 * 12, 1), [28, 12]);
const encoderTape = new Tape(device, { recording: true });
using rows = encoder.forward(encoderTape, { patches, grids, cropKey: 0, indices: [0, 1] });

const ids = Int32Array.of(1, 9, 9, 9, 9, 2, 3, 9, 9, 9, 4, 5);
const places = findImagePlaces(ids, [12], 9);
using matrix = placement(device, places, tp);
using leaf = rows.withGradient(new GradientSlot(device, rows.shape, "f32"));
const tokens = ids.length / tp.size;
const own = (values: Float32Array) => values.subarray(tp.rank * tokens * width, (tp.rank + 1) * tokens * width);
using embedded = Tensor.from(device, own(randomValues(ids.length * width, 2).fill(0)), [tokens, width]);
const tape = new Tape(device, { recording: true });
using merged = placeImageRows(tape, embedded, leaf, matrix, tp);
merged.gradient!.accumulate(Tensor.from(device, own(randomValues(ids.length * width, 3)), [tokens, width]));
tape.backward();
rows.gradient!.accumulate(leaf.gradient!.take()!);
encoderTape.backward();

using store = new ValueStore("gradients", gradientsOf(encoder));
const gradients: Record<string, number[]> = {};
for (const name of store.tensors.keys()) gradients[name] = [...(readTensor(store, name) as Float32Array)];
const blocks: Record<string, unknown> = {};
for (const tensor of encoder.logicalTensors()) {
	blocks[tensor.name] = { width: tensor.shape.slice(1).reduce((a, b) => a * b, 1), blocks: tensor.blocks };
	tensor.value[Symbol.dispose]();
	tensor.gradient?.[Symbol.dispose]();
}
console.log(JSON.stringify({ rows: [...rows.toFloat32()], tokens: [...merged.toFloat32()], gradients, blocks }));
