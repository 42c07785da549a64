/** A language model of every layer kind, trained in this process. */
import { configurationOf } from "../../src/config/resolve.ts";
import { type Microbatch, nextTokenMicrobatch, withoutImages } from "../../src/data/microbatch.ts";
import type { HybridConfig } from "../../src/models/language/config.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import type { Device } from "../../src/native/device.ts";
import { languageAlone, topologyOfLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { assemble, type Run } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import type { StepObserver, StepResult } from "../../src/train/step-state.ts";
import { smallModel } from "../models/small.ts";

export const tiny = (keys: Record<string, unknown> = {}): HybridConfig =>
	hybridConfig(
		configurationOf({
			...smallModel,
			"seq-length": 24,
			...keys,
		}),
	);

/** `count` microbatches of two sequences each. */
export function batch(count: number, seed = 1): Microbatch[] {
	let state = seed;
	const next = () => {
		state = (state * 48271) % 2147483647;
		return state % 61;
	};
	const row = () => Int32Array.from({ length: 25 }, next);
	return Array.from({ length: count }, () => nextTokenMicrobatch([row(), row()]));
}

export class Training implements Disposable {
	private constructor(readonly run: Run) {}

	static async open(
		config: HybridConfig,
		on: Device,
		{ frozen = false, lateWeightGradients = false } = {},
	): Promise<Training> {
		const specification = {
			...{ encoders: [], language: config, clipGrad: 1, seed: 3 },
			frozenLanguage: frozen,
			adam: { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 },
			lateWeightGradients,
		};
		const run = await assemble(specification, topologyOfLayout(languageAlone), World.alone(on));
		run.initialise(7);
		return new Training(run);
	}

	step(
		microbatches: readonly Microbatch[],
		iteration = 0,
		learningRate = 1e-3,
		weightDecay = 0.1,
		observer: StepObserver = {},
	): StepResult {
		const about = { iteration, learningRate, weightDecay };
		return trainStep(this.run.state, { microbatches: microbatches.map(withoutImages), ...about }, observer);
	}

	weights(): number[] {
		return [...this.run.language!.parameters].flatMap(({ value }) => [...value.toFloat32()]);
	}

	[Symbol.dispose](): void {
		this.run[Symbol.dispose]();
	}
}

export async function train(
	device: Device,
	config: HybridConfig,
	steps: number,
	microbatches: (step: number) => readonly Microbatch[],
	lateWeightGradients = false,
) {
	using run = await Training.open(config, device, { lateWeightGradients });
	run.run.state.optimizer.refreshMasters();
	const results = Array.from({ length: steps }, (_, step) => run.step(microbatches(step), step));
	return { results, weights: run.weights() };
}
