/** A training that Megatron-LM began: its torch_dist checkpoint of step 3, converted, goes on here as it did there. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { readRecord } from "../../../src/checkpoint/training/record.ts";
import { restoreTensors } from "../../../src/checkpoint/training/restore.ts";
import { requireTensors, TrainingTensors } from "../../../src/checkpoint/training/tensors.ts";
import type { Device } from "../../../src/native/device.ts";
import { parseLayout, topologyOfLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { MimoBatches } from "../../../src/parity/mimo/batches.ts";
import { readMimoGolden } from "../../../src/parity/mimo/golden.ts";
import { goldenSpecification } from "../../../src/parity/mimo/parity.ts";
import { assemble } from "../../../src/train/assemble.ts";
import { trainStep } from "../../../src/train/step.ts";
import { golden, largeGolden } from "../../golden.ts";
import { testDevice } from "../../support.ts";
import { conversionOptions } from "../conversion/options.ts";

/** A checkpoint of step 3 and the run it is of: the float64 engine's, written by PyTorch, and Megatron-LM's own. */
const trainings = [
	["torch-dist-small", golden("torch-dist-small"), golden("mimo-tp2-tp2ep2-dynamic-small")],
	["megatron-checkpoint", largeGolden("megatron-checkpoint"), largeGolden("mimo-tp2-tp2ep2-dynamic")],
] as const;

let device: Device;
let folder: string;
beforeAll(async () => {
	device = await testDevice();
	folder = mkdtempSync(join(tmpdir(), "mimo-megatron-"));
});
afterAll(() => {
	device[Symbol.dispose]();
	rmSync(folder, { recursive: true });
});

for (const [name, megatron, run] of trainings) {
	test.skipIf(!megatron || !run)(
		`${name}: steps 4 and 5 have the losses and norms of the run`,
		async () => {
			{
				const [source, target] = [megatron!, join(folder, name)];
				using plan = planConversion(conversionOptions({ from: "torch_dist", to: "native", source, target }));
				await plan.run(() => {});
			}
			const { config } = readMimoGolden(run!);
			const { optimizer: adam } = config;
			using trained = await assemble(
				goldenSpecification(config, "f32"),
				topologyOfLayout(parseLayout("1")),
				World.alone(device),
			);
			const { state } = trained;
			{
				using tensors = new TrainingTensors({
					replicas: state.replicas,
					logicalTensors: () => trained.logicalTensors(),
					optimizer: state.optimizer,
					writesLoose: true,
				});
				using checkpoint = NativeCheckpoint.open(join(folder, name));
				requireTensors(tensors, checkpoint, true, state.world);
				restoreTensors(tensors, checkpoint, { optimizer: true });
				const { training, rng, schedules } = readRecord(checkpoint.manifest, checkpoint.path);
				expect(training).toEqual({
					iteration: 3,
					consumedSamples: 12,
					scheduledSamples: 12,
					consumedValidSamples: 0,
					optimizerSteps: 3,
					globalBatchSize: 4,
				});
				expect(rng).toEqual({ seed: 1234 });
				expect(schedules!.learningRate).toMatchObject({ style: "constant", maximum: 1e-3, decaySamples: 4000 });
				state.scalars.setStep(training.optimizerSteps);
			}
			const { losses } = JSON.parse(readFileSync(join(megatron!, "tensors.json"), "utf8")) as {
				losses: { step: number; loss: number; grad_norm: number }[];
			};
			const batches = new MimoBatches(run!, config);
			for (const { step, loss, grad_norm } of losses.filter(({ step }) => step > 3)) {
				const result = trainStep(state, {
					microbatches: batches.step(step - 1),
					iteration: step - 1,
					learningRate: adam.lr,
					weightDecay: adam.weight_decay,
				});
				expect(Math.abs(result.loss / loss - 1)).toBeLessThan(2e-6);
				expect(Math.abs(result.gradientNorm / grad_norm - 1)).toBeLessThan(1e-5);
			}
		},
		60_000,
	);
}
