/** SigLIP and SigLIP 2 alone against transformers': the loss and the norm of every parameter's gradient in the first step. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describeParts, namesOf, openParts } from "../../../src/checkpoint/hf/parts.ts";
import { MappedStore, planTensors } from "../../../src/checkpoint/mapping.ts";
import { gradientsOf, loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { openSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { joinStores, readTensor, selectTensors } from "../../../src/checkpoint/store.ts";
import { patchify } from "../../../src/data/images.ts";
import type { PatchGrid } from "../../../src/models/tower.ts";
import { EncoderModule } from "../../../src/models/vision/encoder.ts";
import { describedEncoder } from "../../../src/models/vision/from-configuration.ts";
import { newProjector } from "../../../src/models/vision/projector.ts";
import { visionEncoder } from "../../../src/models/vit/tower.ts";
import type { Device } from "../../../src/native/device.ts";
import { visionModule } from "../../../src/parallel/index.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { memoryStore } from "../../checkpoint/memory-store.ts";
import { golden } from "../../golden.ts";
import { testDevice } from "../../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** The reference's output is multiplied by a fixed matrix of four columns: an affine projector that does not train. */
const columns = 4;

interface Input {
	/** Channel by channel. */
	readonly patches: Float32Array;
	readonly grids: readonly PatchGrid[];
}

/** The first step's images. */
function inputOf(folder: string, patch: number): Input {
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const { shape } = file.information("1.pixel_values");
	const values = file.read("1.pixel_values") as Float32Array;
	if (shape.length === 4) {
		const [images, , height, width] = shape as [number, number, number, number];
		const size = 3 * height * width;
		const all = Array.from({ length: images }, (_, image) =>
			patchify(values.subarray(image * size, (image + 1) * size), height, width, patch),
		);
		const grid = { rows: height / patch, columns: width / patch };
		return { patches: Float32Array.from(all.flatMap((one) => [...one])), grids: all.map(() => grid) };
	}
	// SigLIP 2: rows of values, channels last, padded to a common number of patches.
	const [, most, width] = shape as [number, number, number];
	const sides = file.read("1.spatial_shapes") as Int32Array;
	const grids = Array.from({ length: sides.length / 2 }, (_, image) => ({
		rows: Number(sides[2 * image]),
		columns: Number(sides[2 * image + 1]),
	}));
	const rows = grids.flatMap((grid, image) =>
		Array.from({ length: grid.rows * grid.columns }, (_, row) => {
			const from = (image * most + row) * width;
			return values.subarray(from, from + width);
		}),
	);
	const pixels = width / 3;
	const byChannel = (row: Float32Array) =>
		Array.from(row, (_, at) => row[(at % pixels) * 3 + Math.floor(at / pixels)]!);
	return { patches: Float32Array.from(rows.flatMap(byChannel)), grids };
}

test.each(["encoder-siglip", "encoder-siglip2"])("%s", (name) => {
	const folder = golden(name);
	const reference = JSON.parse(readFileSync(join(folder, "golden.json"), "utf8"));
	using parts = openParts(folder, { visionHeads: null });
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const described = { ...describeParts(parts), hiddenSize: columns, hybridLayerPattern: "*", initMethodStd: 0.02 };
	const { tower } = describedEncoder(described as unknown as Parameters<typeof describedEncoder>[0], { bf16: false });
	const encoderParts = visionEncoder({
		tower,
		projector: newProjector({ inputSize: tower.hiddenSize, outputSize: columns, inner: null, initMethodStd: 0.02 }),
	});
	using encoder = new EncoderModule(device, encoderParts, { frozenTower: false, frozenProjector: true });
	const projection = file.read("projection") as Float32Array;
	const transposed = Float32Array.from(projection, (_, at) => {
		const [column, row] = [Math.floor(at / tower.hiddenSize), at % tower.hiddenSize];
		return projection[row * columns + column]!;
	});
	const matrix = memoryStore({
		[`modality_submodules.${visionModule}.input_projections.0.encoder.weight`]: {
			shape: [columns, tower.hiddenSize],
			values: transposed,
		},
	});
	loadModel(encoder, joinStores(folder, [parts.weights, matrix]));
	const { patches, grids } = inputOf(folder, tower.patchSize);
	const target = file.read("1.target") as Float32Array;
	using tape = new DisposableStack();
	const record = new Tape(device, { recording: true });
	tape.defer(() => record.discard());
	using input = Tensor.from(device, patches, [patches.length / (3 * tower.patchSize ** 2), 3 * tower.patchSize ** 2]);
	using rows = encoder.forward(record, { patches: input, grids, cropKey: 0, indices: grids.map((_, image) => image) });
	const output = rows.toFloat32();
	expect(output.length).toBe(target.length);
	const differences = Float64Array.from(output, (value, at) => value - target[at]!);
	const loss = differences.reduce((sum, x) => sum + x * x, 0) / target.length;
	expect(Math.abs(loss / reference.steps[0].loss - 1)).toBeLessThan(2e-6);
	rows.gradient!.accumulate(
		Tensor.from(
			device,
			Float32Array.from(differences, (x) => (2 * x) / target.length),
			rows.shape,
		),
	);
	record.backward();
	const projected = (name: string) => name.includes("input_projections");
	using gradients = selectTensors(new ValueStore("the gradients", gradientsOf(encoder)), (name) => !projected(name));
	using mapped = new MappedStore(gradients, planTensors(gradients, namesOf(parts), "foreign"));
	const norms = Object.entries(reference.step1_probe.grad_norm as Record<string, number>);
	expect(norms.length).toBe(mapped.tensors.size);
	for (const [parameter, expected] of norms) {
		const values = readTensor(mapped, parameter) as Float32Array;
		const norm = Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));
		expect(Math.abs(norm - expected)).toBeLessThanOrEqual(2e-5 * expected + 1e-7);
	}
});
