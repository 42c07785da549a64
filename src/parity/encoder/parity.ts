/**
 * Vision towers alone that Hugging Face transformers trained: the loss is the mean of (output · projection − target)² over rows and
 * columns, with a fixed projection. In this process, without a language model.
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import {
	describeParts,
	type FolderParts,
	gradientsOf,
	isTowerType,
	loadModel,
	MappedStore,
	namesOf,
	openParts,
	openSafetensors,
	planTensors,
	readTensor,
	type SafetensorsFile,
	towerPrefix,
	ValueStore,
} from "../../checkpoint/index.ts";
import { type ImageSet, joinImages } from "../../data/images.ts";
import { EncoderModule } from "../../models/vision/encoder.ts";
import { describedEncoder } from "../../models/vision/from-configuration.ts";
import { newProjector, projectorParameters } from "../../models/vision/projector.ts";
import { visionEncoder } from "../../models/vit/tower.ts";
import type { Device } from "../../native/device.ts";
import { clipGradients, sumSquares } from "../../optim/gradient-norm.ts";
import { Optimizer } from "../../optim/optimizer.ts";
import { StepScalars } from "../../optim/step-scalars.ts";
import { DataParallel, groupOfOne, visionModule } from "../../parallel/index.ts";
import { Tape, Tensor } from "../../tensor/index.ts";
import { partOf } from "../../train/restart/hugging-face.ts";
import { bandLimit, type Check, type ParityReport, requireBands } from "../comparison.ts";
import { adamW, configurationHas, readReferenceJson, requireKeys } from "../golden-fields.ts";
import { decayRule } from "../language/parity.ts";
import { readPictures } from "../pictures/batches.ts";
import { ProbeSums } from "../probe-sums.ts";
import { type CompareOptions, checksOfStep, trainedBy } from "../reference.ts";

/** Limits of a gradient's norm: relative, and what rounding makes of a true zero, such as that of a key's bias. */
const gradNormLimit = 2e-5;
const gradNormRounding = 1e-7;

/** transformers' values by the encoder's names for them, but for layers. */
const names: Readonly<Record<string, string>> = {
	decoder_input: "vision.layer.0.input",
	radio_out: "vision.norm",
	encoder_out: "output",
};

const probe = v.object({
	shape: v.array(v.number()),
	...{ mean: v.number(), rms: v.number(), wave: v.number(), head: v.array(v.number()) },
});

const goldenSchema = v.object({
	optimizer: v.object({ ...adamW, no_weight_decay: v.array(v.string()) }),
	exact_steps: v.number(),
	steps: v.array(
		v.object({ loss: v.number(), grad_norm: v.number(), loss_band: v.number(), grad_norm_band: v.number() }),
	),
	step1_probe: v.object({ activations: v.record(v.string(), probe), grad_norm: v.record(v.string(), v.number()) }),
});

type Golden = v.InferOutput<typeof goldenSchema>;

/** Whether a folder is the reference of a tower alone. */
export function isEncoderReference(folder: string): boolean {
	const [isOne, isWhole] = ["model_type", "vision_config"].map((key) => configurationHas(folder, key));
	if (!isOne || isWhole || !existsSync(join(folder, "golden.json"))) return false;
	return isTowerType(
		readReferenceJson(v.looseObject({ model_type: v.unknown() }), join(folder, "config.json")).model_type,
	);
}

/** Trains the tower of a folder as its reference was trained, and compares. */
export function compareEncoder(device: Device, folder: string, options: CompareOptions = {}): ParityReport {
	const path = join(folder, "golden.json");
	const golden = readReferenceJson(goldenSchema, path);
	requireBands(path, golden.exact_steps, golden.steps);
	using owned = new DisposableStack();
	const parts = owned.use(openParts(folder, { visionHeads: null }));
	const correspondence = namesOf(parts);
	const trained = correspondence.links.map(({ foreign }) => foreign);
	requireKeys(`${path}: grad_norm`, golden.step1_probe.grad_norm, trained);
	const file = owned.use(openSafetensors(join(folder, "batches.safetensors")));
	const { config, encoder } = moduleOf(device, parts, file);
	owned.use(encoder);
	loadModel(partOf(encoder, towerPrefix), parts.weights);
	const alone = groupOfOne("encoder", 0);
	const replica = new DataParallel(encoder.parameters, {
		...{ dense: alone, expert: alone },
		...{ sequenceParallel: null, copies: null },
	});
	const scalars = owned.use(new StepScalars(device));
	const { adam, clipGrad } = trainedBy(golden.optimizer);
	const decay = decayRule(correspondence, encoder.config.tower.parameters(), golden.optimizer);
	const optimizer = owned.use(new Optimizer([replica], scalars, { ...adam, ...decay }));
	scalars.set("learningRate", golden.optimizer.lr);
	scalars.set("weightDecay", golden.optimizer.weight_decay);
	const steps = Math.min(options.steps ?? golden.steps.length, golden.steps.length);
	const checks: Check[] = [];
	for (const [index, expected] of golden.steps.slice(0, steps).entries()) {
		options.onStep?.(index + 1, steps);
		encoder.parameters.zeroGradients();
		const images = joinImages(readPictures(file, index + 1, config));
		const observed = index === 0 ? observerOf(golden) : null;
		const loss = lossOf(encoder, images, file.read(`${index + 1}.target`) as Float32Array, observed?.observe);
		sumSquares([replica], scalars);
		clipGradients(scalars, 1, clipGrad, alone);
		const check = checksOfStep(index);
		checks.push(
			...(observed?.checks(alone, device) ?? []),
			...(index === 0 ? gradientChecks(encoder, parts, golden) : []),
			check("loss", expected.loss, loss, bandLimit("loss", expected.loss_band)),
			check(
				"gradient norm",
				expected.grad_norm,
				scalars.read().gradientNorm,
				bandLimit("grad_norm", expected.grad_norm_band),
			),
		);
		optimizer.step();
	}
	return { folder, checks };
}

/** The folder's tower with the reference's projection behind it, which does not train. */
function moduleOf(device: Device, parts: FolderParts, file: SafetensorsFile) {
	const [inputSize, outputSize] = file.information("projection").shape as [number, number];
	const described = { ...describeParts(parts), hiddenSize: outputSize, hybridLayerPattern: "*", initMethodStd: 0.02 };
	const { tower: config } = describedEncoder(described as unknown as Parameters<typeof describedEncoder>[0], {
		bf16: false,
	});
	const projector = newProjector({ inputSize, outputSize, inner: null, initMethodStd: 0.02 });
	const encoder = new EncoderModule(device, visionEncoder({ tower: config, projector }), {
		frozenTower: false,
		frozenProjector: true,
	});
	const projection = file.read("projection") as Float32Array;
	const [weight] = projectorParameters(projector, visionModule);
	const transposed = Float32Array.from(projection, (_, at) => {
		const [row, column] = [at % inputSize, Math.floor(at / inputSize)];
		return projection[row * outputSize + column]!;
	});
	device.copyToDevice(encoder.parameters.get(weight!.name).value, transposed);
	return { config, encoder };
}

/** The loss of a step's images; their gradients are left in the parameters. */
function lossOf(
	encoder: EncoderModule,
	{ patches, grids }: ImageSet,
	target: Float32Array,
	observe?: (name: string, value: Tensor) => void,
): number {
	const { device } = encoder;
	const { patchWidth } = encoder.config.tower;
	using owned = new DisposableStack();
	const tape = new Tape(device, { recording: true });
	owned.defer(() => tape.discard());
	using input = Tensor.from(device, patches, [patches.length / patchWidth, patchWidth]);
	using rows = encoder.forward(
		tape,
		{ patches: input, grids, cropKey: 0, indices: grids.map((_, image) => image) },
		observe,
	);
	const differences = rows.toFloat32().map((value, at) => value - target[at]!);
	const gradient = differences.map((difference) => (2 * difference) / target.length);
	rows.gradient!.accumulate(Tensor.from(device, gradient, rows.shape));
	tape.backward();
	return differences.reduce((sum, difference) => sum + difference * difference, 0) / target.length;
}

/** Sums of the recorded values of step 1 that hold rows of images alone; towers of native sizes record rows of padding too. */
function observerOf({ step1_probe: { activations } }: Golden) {
	const found = new Map<string, { readonly values: Float32Array; readonly name: string }>();
	return {
		observe: (own: string, value: Tensor) => {
			const name = names[own] ?? `vision.${own}`;
			const recorded = activations[name];
			const elements = recorded?.shape.reduce((product, size) => product * size, 1);
			if (elements === value.elements) found.set(name, { values: value.toFloat32(), name });
		},
		checks: (group: ReturnType<typeof groupOfOne>, device: Device): Check[] => {
			const all = [...found.values()];
			const sums = new ProbeSums(
				all.map(({ name, values }) => ({ ...activations[name]!, name: `step 1 ${name}`, elements: values.length })),
			);
			for (const [index, { values }] of all.entries()) sums.add(index, values, 0);
			return sums.checks(group, device);
		},
	};
}

/** Norms of the gradients of step 1 by transformers' names. */
function gradientChecks(encoder: EncoderModule, parts: FolderParts, golden: Golden): Check[] {
	using gradients = new ValueStore("the gradients", partOf(gradientsOf(encoder), towerPrefix));
	using mapped = new MappedStore(gradients, planTensors(gradients, namesOf(parts), "foreign"));
	return Object.entries(golden.step1_probe.grad_norm).map(([name, expected]) => {
		const values = readTensor(mapped, name) as Float32Array;
		const actual = Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
		const error = Math.max(0, Math.abs(actual - expected) - gradNormRounding) / Math.max(expected, gradNormRounding);
		return { name: `step 1 gradient of ${name}`, expected, actual, error, limit: gradNormLimit };
	});
}
