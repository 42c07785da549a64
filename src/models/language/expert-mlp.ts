/** The MLPs of a layer's experts, on the rows that were routed to this rank (docs/spec/moe-performance.md §1). */
import { fusedMlpObstacle } from "../../config/fused-mlp.ts";
import type { OffloadModule } from "../../config/recompute-modules.ts";
import {
	activation,
	type E4m3Form,
	e4m3FormOf,
	groupedMlp,
	offload,
	type Tape,
	type Tensor,
} from "../../tensor/index.ts";
import type { LayerContext } from "./layer-context.ts";
import { biasOf, hasAdapter, projectByExpert } from "./projection.ts";
import { runModule } from "./recomputed-module.ts";
import type { ExpertRows } from "./token-dispatcher/dispatcher.ts";

const first = "mlp.experts.linear_fc1.weight";
const second = "mlp.experts.linear_fc2.weight";

/**
 * fc1, weighted activation and fc2 of rows sorted by local expert: as one fused operation, which keeps no activation (recompute
 * module moe_act), or as three.
 */
export function expertMlp(tape: Tape, context: LayerContext, sorted: ExpertRows): Tensor {
	const { mlp, moe } = context.config;
	const { rows, rowProbability, offsets } = sorted;
	if (expertTensorOf(context) > 1 && context.config.biases.of === "all") {
		throw new RangeError("Biases of experts that are cut over ranks would be added once a rank.");
	}
	const options = { clamp: mlp.clamp, linearOffset: mlp.linearOffset, interleave: moe.interleave };
	const weightGradientsHide = context.parallel.experts !== null;
	const observe = context.probe("preactivation");
	const onPreactivation = observe && ((z: Tensor) => observe(z, sorted));
	if (runsFused(context)) {
		const weights = {
			fc1: context.weights(first),
			fc2: context.weights(second),
			fc1Bias: biasOf(context, first),
			fc2Bias: biasOf(context, second),
		};
		return groupedMlp(tape, sorted, weights, {
			...options,
			activation: mlp.activation,
			recipe: moe.recipe,
			weightGradientRecipe: moe.weightGradientRecipe,
			weightGradientsHide,
			onPreactivation,
			onKept: (x, z) => {
				for (const form of x) toHost(tape, context, "expert_fc1", form);
				toHost(tape, context, "moe_act", z);
			},
		});
	}
	const mask = context.layerMasks?.moe?.channels ?? null;
	using channels = projectByExpert(tape, context, rows, first, { offsets, weightGradientHides: weightGradientsHide });
	if (tape.recording && mask === null) onPreactivation?.(channels);
	toHost(tape, context, "expert_fc1", rows);
	using weighted = runModule(tape, context.config, "moe_act", [channels, rowProbability], (on, x, probability) =>
		activation(on, x, mlp.activation, { ...options, rowProbability: probability, mask }),
	);
	context.probe("channels")?.(weighted.y, sorted);
	const outputs = projectByExpert(tape, context, weighted.y, second, {
		offsets,
		factor: rowProbability,
		weightGradientHides: weightGradientsHide,
	});
	context.probe("experts")?.(outputs, sorted);
	weighted.drop();
	// Behind the drop: a second forward of the activation reads the channels.
	toHost(tape, context, "moe_act", channels);
	return outputs;
}

/** Keeps a module's input in the host's memory if the configuration names the module and the input is large enough. */
function toHost(tape: Tape, { config: { offload: wanted } }: LayerContext, module: OffloadModule, x: Tensor): void {
	if (wanted?.modules.includes(module) && x.elements >= wanted.leastElements) offload(tape, x);
}

/** The e4m3 form in which the experts read their rows; null: they read no e4m3. */
export function rowsInE4m3(context: LayerContext): E4m3Form | null {
	return runsFused(context) ? e4m3FormOf(context.config.moe, biasOf(context, first) !== null) : null;
}

/** Number of ranks over which an expert's channels are sharded. */
function expertTensorOf({ parallel: { experts } }: LayerContext): number {
	return experts?.expertTensor ?? 1;
}

function runsFused(context: LayerContext): boolean {
	const { moe, mlp } = context.config;
	// The fused operation does not produce these values between and after its projections.
	const apart = context.probe("channels") !== null || context.probe("experts") !== null;
	if (moe.fused === "off" || apart) return false;
	return (
		fusedMlpObstacle({
			expertTensor: expertTensorOf(context),
			activation: mlp.activation,
			adapters: hasAdapter(context, first) || hasAdapter(context, second),
			masks: context.masks !== null,
		}) === null
	);
}
