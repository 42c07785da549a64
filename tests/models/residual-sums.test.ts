/** Residual sums that norms write: whole steps have the bits of sums written apart, and hardly any sum is written apart. */

import { afterAll, beforeAll, describe, expect, spyOn, test } from "bun:test";
import { elastic as elasticGuest, routerIn } from "../../src/guests/elastic/elastic.ts";
import { EncoderModule } from "../../src/models/vision/encoder.ts";
import { visionEncoder } from "../../src/models/vit/tower.ts";
import type { Device } from "../../src/native/device.ts";
import { languageAlone, namedTopology } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { ResidualSum } from "../../src/tensor/residual-sum.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { assemble } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import { byLayer, familyOf, parentSeed, softMasks, text } from "../guests/elastic/family-model.ts";
import { randomValues, testDevice } from "../support.ts";
import { batch, Training, tiny } from "../train/training.ts";
import { tinyProjector, tinyTower } from "./vit/tower.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

interface Outcome {
	/** The results, which must not depend on where sums are written. */
	readonly bits: unknown;
	/** How often each operation ran. */
	readonly operations: ReadonlyMap<string, number>;
}

/** `run` with sums that norms write, and with sums written apart. */
async function bothWays(run: () => Promise<unknown> | unknown): Promise<readonly [together: Outcome, apart: Outcome]> {
	const once = async (): Promise<Outcome> => {
		const spy = spyOn(device, "run");
		try {
			const bits = await run();
			const operations = new Map<string, number>();
			for (const [name] of spy.mock.calls) operations.set(name, (operations.get(name) ?? 0) + 1);
			return { bits, operations };
		} finally {
			spy.mockRestore();
		}
	};
	const together = await once();
	const taking = spyOn(ResidualSum.prototype, "takeAddends").mockImplementation(function (this: ResidualSum) {
		this.written();
		return null;
	});
	try {
		return [together, await once()];
	} finally {
		taking.mockRestore();
	}
}

const count = ({ operations }: Outcome, name: string) => operations.get(name) ?? 0;

describe("a step of the language model", () => {
	const dropout = { "hidden-dropout": 0.1, "attention-dropout": 0.1 };
	const full = (method: string, layers: number) => ({
		"recompute-granularity": "full",
		"recompute-method": method,
		"recompute-num-layers": layers,
	});
	const selective = { "recompute-granularity": "selective", "recompute-modules": ["layernorm", "mlp"] };
	/** Sums of the residual stream that no norm writes, in a forward pass of a microbatch. */
	const cases: readonly (readonly [string, Record<string, unknown>, apart: number])[] = [
		["fp32", {}, 0],
		["bf16 with dropout", { bf16: true, ...dropout }, 0],
		["multi-token prediction", { bf16: true, "hybrid-layer-pattern": "M*-/M*" }, 0],
		["selective recomputation", { bf16: true, ...dropout, ...selective }, 0],
		// The output of a recomputed run of layers is kept: its sum is written apart, and once more in the second forward.
		["full recomputation, runs of 2 layers", { bf16: true, ...dropout, ...full("uniform", 2) }, 4],
		["full recomputation of a layer", { bf16: true, ...full("block", 1) }, 2],
	];
	for (const [name, keys, apart] of cases) {
		test(name, async () => {
			const config = tiny({ "hybrid-layer-pattern": "M*-", ...keys });
			const [together, separate] = await bothWays(async () => {
				using training = await Training.open(config, device);
				training.run.state.optimizer.refreshMasters();
				const results = [0, 1].map((step) => training.step(batch(2, step + 1), step));
				const gradients = [...training.run.language!.parameters].map((one) => one.mainGradient?.toFloat32());
				return { results, gradients, weights: training.weights() };
			});
			expect(together.bits).toEqual(separate.bits);
			const microbatches = 4;
			expect(count(together, "add")).toBe(microbatches * apart);
			expect(count(separate, "add")).toBeGreaterThan(count(together, "add"));
			expect(count(together, "rms_norm_forward")).toBe(count(separate, "rms_norm_forward"));
		});
	}
});

test("a step of an elastic model, whose sums and norms are masked", async () => {
	const { model, elastic } = familyOf({ ...byLayer, ...softMasks });
	const [together, apart] = await bothWays(async () => {
		using run = await assemble(
			{
				...{ encoders: [], clipGrad: 0, seed: 1, language: model, guests: [elasticGuest({ config: elastic })] },
				frozenLanguage: false,
				adam: { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 },
			},
			namedTopology(languageAlone).topology,
			World.alone(device),
		);
		run.initialise(parentSeed);
		const result = trainStep(run.state, { microbatches: [text], iteration: 0, learningRate: 0, weightDecay: 0 });
		const parameters = [...routerIn(run.guests)!.parameters, ...run.language!.parameters];
		return { result, gradients: parameters.map(({ mainGradient }) => mainGradient?.toFloat32()) };
	});
	expect(together.bits).toEqual(apart.bits);
	expect(count(apart, "mask_columns_forward") - count(together, "mask_columns_forward")).toBe(model.pattern.length);
});

test("the vision encoder, forward and backward", async () => {
	const [together, apart] = await bothWays(() => {
		const options = { frozenTower: false, frozenProjector: false };
		const projector = tinyProjector(10);
		using encoder = new EncoderModule(
			device,
			visionEncoder({ tower: { ...tinyTower, dtype: "bf16" }, projector }),
			options,
		);
		encoder.initialise(7);
		using patches = Tensor.from(device, randomValues(16 * 12, 1), [16, 12], { dtype: "bf16" });
		const tape = new Tape(device, { recording: true });
		using rows = encoder.forward(tape, { patches, grids: [{ rows: 4, columns: 4 }], cropKey: 0, indices: [0] });
		rows.gradient!.accumulate(Tensor.from(device, randomValues(rows.elements, 2), rows.shape, { dtype: "bf16" }));
		tape.backward();
		return [rows.toFloat32(), ...[...encoder.parameters].map(({ mainGradient }) => mainGradient?.toFloat32())];
	});
	expect(together.bits).toEqual(apart.bits);
	// Positions are added to patches; the sums of two layers are the norms'.
	expect([count(together, "add"), count(apart, "add")]).toEqual([1, 1 + 2 * tinyTower.layers]);
});
