/** A model beside a frozen teacher: what it learns, and what each loss weighs. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { copyBlocks, loadModel, ValueStore } from "../../src/checkpoint/model-store.ts";
import type { Device } from "../../src/native/device.ts";
import { languageAlone, namedTopology } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { languageMicrobatches, planOf } from "../../src/parity/verify/plan.ts";
import { assemble, type Run } from "../../src/train/assemble.ts";
import { distillationLossName } from "../../src/train/losses.ts";
import { type StepResult, trainStep } from "../../src/train/step.ts";
import { smallSubject } from "../parity/verify/subject.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const { language, samples, adam, sequenceLength } = smallSubject({ "llm-only": true });
const layout = namedTopology(languageAlone);
const plan = planOf(layout, { samples: samples.length, microBatchSize: 4, sequenceLength });
const microbatches = languageMicrobatches(plan, samples, 0).map((text) => ({
	text,
	images: { patches: new Float32Array(0), grids: [], imagesPerSample: text.lengths.map(() => 0) },
}));

/** A student of seed 1 and a teacher with the weights of another seed. */
async function open(alpha: number, teacherSeed: number, temperature = 1): Promise<Run> {
	const specification = {
		...{ encoder: null, imageTokenId: null, clipGrad: 0, seed: 1, language, adam },
		frozen: { tower: true, projector: true, language: false },
		distillation: { alpha, temperature },
	};
	const run = await assemble(specification, layout.topology, World.alone(device));
	run.initialise(teacherSeed);
	using weights = new ValueStore("teacher", run.language!);
	loadModel(run.teacher!, weights);
	run.initialise(1);
	return run;
}

const step = (run: Run, gradients: () => void = () => {}): StepResult =>
	trainStep(run.state, { microbatches, iteration: 0, learningRate: 1e-2, weightDecay: 0 }, { gradients });

/** All gradients, one after the other. */
function gradientsOf(run: Run): Float32Array {
	const all: number[] = [];
	for (const { value, gradient, shape, blocks } of run.language!.logicalTensors()) {
		if (gradient) {
			const full = new Float32Array(shape.reduce((product, size) => product * size, 1));
			copyBlocks(gradient.toFloat32(), gradient.width, full, full.length / shape[0]!, blocks, "to full");
			all.push(...full);
			gradient[Symbol.dispose]();
		}
		value[Symbol.dispose]();
	}
	return Float32Array.from(all);
}

test("a teacher of the same weights teaches nothing; the divergence from another one falls", async () => {
	using same = await open(1, 1);
	const nothing = step(same);
	expect(Math.abs(nothing.losses[distillationLossName]!)).toBeLessThan(1e-6);
	expect(nothing.gradientNorm).toBeLessThan(1e-4);
	using other = await open(1, 2, 2);
	const first = step(other).losses[distillationLossName]!;
	for (let count = 0; count < 6; count++) step(other);
	const last = step(other).losses[distillationLossName]!;
	expect(first).toBeGreaterThan(1e-3);
	expect(last).toBeLessThan(0.5 * first);
});

test("the gradient is that of both losses by their weights", async () => {
	const gradients: Float32Array[] = [];
	for (const alpha of [0, 1, 0.25]) {
		using run = await open(alpha, 2);
		step(run, () => gradients.push(gradientsOf(run)));
	}
	const [plain, taught, mixed] = gradients as [Float32Array, Float32Array, Float32Array];
	const wanted = plain.map((x, at) => 0.75 * x + 0.25 * taught[at]!);
	const norm = Math.sqrt(wanted.reduce((sum, x) => sum + x * x, 0));
	expect(Math.sqrt(mixed.reduce((sum, x, at) => sum + (x - wanted[at]!) ** 2, 0))).toBeLessThan(1e-5 * norm);
	expect(Math.sqrt(taught.reduce((sum, x) => sum + x * x, 0))).toBeGreaterThan(1e-3);
});
