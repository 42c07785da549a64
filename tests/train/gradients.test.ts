/** The gradient of every parameter of a whole model, against central differences of the losses that a step reports. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { nextTokenMicrobatch, withoutImages } from "../../src/data/microbatch.ts";
import type { HybridConfig } from "../../src/models/language/config.ts";
import { loggedName } from "../../src/models/language/router-state.ts";
import type { Device } from "../../src/native/device.ts";
import type { Parameter } from "../../src/tensor/parameter.ts";
import { takeGradients } from "../../src/train/step.ts";
import type { StepGradients } from "../../src/train/step-state.ts";
import { randomValues, testDevice } from "../support.ts";
import { Training, tiny } from "./training.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** Losses beside the next token's are large enough to show in a gradient, and no expert bias moves between two steps. */
const common = {
	"hybrid-layer-pattern": "M*E-/*E/*E",
	"mtp-loss-scaling-factor": 0.5,
	"moe-router-bias-update-rate": 0,
	"moe-router-load-balancing-type": ["seq_aux_loss", "aux_loss", "pooled_aux_loss"],
	"moe-aux-loss-coeff": [0.5, 0.3, 0.4],
	"moe-z-loss-coeff": 0.1,
};
const tied = {
	...common,
	"moe-shared-expert-gate": true,
	"untie-embeddings-and-output-weights": false,
	"apply-layernorm-1p": true,
	"post-layernorm": true,
	"embedding-multiplier": 3,
	"softmax-scale": 0.7,
	"squared-relu": false,
	geglu: true,
};
const gated = {
	...common,
	"mtp-use-repeated-layer": true,
	"position-embedding-type": "yarn",
	"rotary-scaling-factor": 8,
	"yarn-original-max-position-embeddings": 8,
	"softmax-type": "learnable",
	"add-bias-linear": true,
	"squared-relu": false,
	swiglu: true,
	"moe-shared-expert-intermediate-size": 0,
	"moe-latent-size": 24,
};

const delta = {
	...{
		"hybrid-layer-pattern": "*G-/G",
		"attention-output-gate": true,
		"apply-layernorm-1p": true,
		"qk-layernorm": true,
	},
	...{ "linear-num-key-heads": 2, "linear-num-value-heads": 4, "linear-key-head-dim": 8, "linear-value-head-dim": 6 },
	"position-embedding-type": "rope",
	"rotary-percent": 0.5,
};

/** Every token has a label, so that the routers' losses have their coefficients as weights. */
const microbatches = [
	withoutImages(nextTokenMicrobatch([Int32Array.of(2, 3, 5, 8, 13, 21, 34, 55, 28), Int32Array.of(1, 4, 9, 16, 25)])),
];

/** One unit in the last place of an fp32 loss between 4 and 8. */
const lossNoise = 2 ** -21;

/** The loss that the gradient is of. */
function objective({ losses, balancingByLayer }: StepGradients, { mtp, moe }: HybridConfig): number {
	let sum = losses["lm loss"]!;
	for (let depth = 1; depth <= mtp!.depths; depth++)
		sum += (mtp!.lossScalingFactor / mtp!.depths) * losses[`mtp_${depth} loss`]!;
	for (const own of balancingByLayer.values()) {
		sum += moe.zLossCoefficient * own[loggedName("z_loss")]!;
		for (const { type, coefficient } of moe.balancing) {
			// Of a loss of all layers together, what is logged is a mean over layers.
			const layers = type === "pooled_aux_loss" ? balancingByLayer.size : 1;
			sum += (coefficient / layers) * own[loggedName(type)]!;
		}
	}
	return sum;
}

test.each([
	["biases, gates, rotary positions by YaRN, sinks and repeated depths", gated],
	["Gated DeltaNet, gated attention and zero-centred norms", delta],
	["a shared expert, tied and scaled embeddings, zero-centred norms behind layers too, and depths of their own", tied],
])("%s", async (_, keys) => {
	using training = await Training.open(tiny(keys), device);
	const { state, language } = training.run;
	const { parameters, routers, config } = language!;
	const chosen: number[] = [];
	for (const router of routers.values()) router.onRouting = (experts) => void chosen.push(...experts.toInt32());
	const step = (gradients = () => {}) => {
		chosen.length = 0;
		const input = { microbatches, iteration: 0, learningRate: 0, weightDecay: 0 };
		const loss = objective(takeGradients(state, input, { gradients }), config);
		return { loss, experts: chosen.join() };
	};
	// Biases begin at zero, and time steps so small that the loss hardly depends on them.
	for (const { name, value } of parameters) {
		const own = value.toFloat32();
		const noise = randomValues(own.length, 5);
		const set = name.endsWith("dt_bias") ? noise : noise.map((x, at) => own[at]! + 0.05 * x);
		device.copyToDevice(value, set);
	}
	const gradients = new Map<Parameter, Float32Array>();
	const { experts } = step(() => {
		for (const parameter of parameters) gradients.set(parameter, parameter.mainGradient!.toFloat32());
	});
	const wrong: string[] = [];
	for (const [{ name, value }, gradient] of gradients) {
		const own = value.toFloat32();
		const noise = randomValues(own.length, 1);
		const [norm, length] = [Math.hypot(...gradient) || 1, Math.hypot(...noise)];
		// Along the gradient, where differences are largest, and elsewhere, for what the gradient lacks.
		const direction = noise.map((x, at) => x / length + gradient[at]! / norm);
		const slope = gradient.reduce((sum, x, at) => sum + x * direction[at]!, 0);
		const moved = (distance: number) => {
			device.copyToDevice(
				value,
				own.map((x, at) => x + distance * direction[at]!),
			);
			return step();
		};
		// The loss jumps where a token changes its experts, so both points have the experts of the point between.
		const kept = [4e-3, 1e-3, 2.5e-4, 6e-5].some((distance) => {
			const [above, below] = [moved(distance), moved(-distance)];
			if (above.experts !== experts || below.experts !== experts) return false;
			const found = (above.loss - below.loss) / (2 * distance);
			if (!(Math.abs(found - slope) < 1e-3 * Math.abs(slope) + lossNoise / distance))
				wrong.push(`${name}: ${slope}, by differences ${found}`);
			return true;
		});
		if (!kept) wrong.push(`${name}: no step keeps the experts`);
		device.copyToDevice(value, own);
	}
	expect(wrong).toEqual([]);
});
