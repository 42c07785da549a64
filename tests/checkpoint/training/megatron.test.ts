/** A training that Megatron-LM began: its torch_dist checkpoint of step 3, converted, goes on here as it did there. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { readRecord } from "../../../src/checkpoint/training/record.ts";
import { restoreTensors } from "../../../src/checkpoint/training/restore.ts";
import { requireTensors } from "../../../src/checkpoint/training/strict.ts";
import { TrainingTensors } from "../../../src/checkpoint/training/tensors.ts";
import { HybridModel } from "../../../src/models/hybrid/model.ts";
import { EncoderModule } from "../../../src/models/mimo/encoder.ts";
import type { Device } from "../../../src/native/device.ts";
import { AdamW } from "../../../src/optim/adamw.ts";
import { StepScalars } from "../../../src/optim/step-scalars.ts";
import { onlyReplica } from "../../../src/parallel/data-parallel.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { MimoBatches } from "../../../src/parity/mimo-batches.ts";
import { readMimoGolden } from "../../../src/parity/mimo-golden.ts";
import { goldenEncoderConfig, goldenLanguageConfig } from "../../../src/parity/mimo-model.ts";
import { ColocatedSchedule } from "../../../src/train/colocated-schedule.ts";
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
			using encoder = new EncoderModule(device, goldenEncoderConfig(config, "f32"), {
				frozenTower: config.vision.frozen,
				frozenProjector: config.projector.frozen,
			});
			using language = new HybridModel(device, goldenLanguageConfig(config, "f32"), { frozen: false });
			const replicas = [onlyReplica(encoder.parameters), onlyReplica(language.parameters)];
			using scalars = new StepScalars(device);
			using optimizer = new AdamW(replicas, scalars, {
				beta1: adam.betas[0],
				beta2: adam.betas[1],
				epsilon: adam.eps,
			});
			const world = groupOfOne("world", 0);
			{
				using tensors = new TrainingTensors({
					replicas,
					*logicalTensors() {
						yield* encoder.logicalTensors();
						yield* language.logicalTensors();
					},
					optimizer,
					writesLoose: true,
				});
				using checkpoint = NativeCheckpoint.open(join(folder, name));
				requireTensors(tensors, checkpoint, true, world);
				restoreTensors(tensors, checkpoint, true);
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
				scalars.setStep(training.optimizerSteps);
			}
			const { losses } = JSON.parse(readFileSync(join(megatron!, "tensors.json"), "utf8")) as {
				losses: { step: number; loss: number; grad_norm: number }[];
			};
			const batches = new MimoBatches(run!, config);
			const state = {
				replicas,
				routers: [...language.routers.values()],
				routerGroup: groupOfOne("language.tp_dp", 0),
				world,
				schedule: new ColocatedSchedule(encoder, language, config.language_model.image_token_id),
				countsLoss: true,
				optimizer,
				scalars,
				clipGrad: adam.clip_grad,
				seed: 1,
			};
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
