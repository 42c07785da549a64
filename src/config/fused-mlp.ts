/** Decides whether the experts of a layer run as one fused operation (docs/spec/moe-performance.md §1.4). */
import type { ActivationName } from "../native/abi.ts";
import { activationOf, activations, activationsThat } from "../native/activations.ts";
import { hasLayer } from "./hybrid-pattern.ts";
import type { TrainingConfiguration } from "./schema.ts";

export interface ExpertLayer {
	/** Tensor-parallel size of an expert. */
	readonly expertTensor: number;
	readonly activation: ActivationName;
	/** Whether low-rank adapters train beside the experts' projections. */
	readonly adapters: boolean;
	/** Whether masks of an elastic model act between the projections. */
	readonly masks: boolean;
}

/** Why the experts cannot run as one fused operation, as the end of "… because"; null: they can. */
export function fusedMlpObstacle({ expertTensor, activation, adapters, masks }: ExpertLayer): string | null {
	if (expertTensor > 1) return `llm-expt-tp is ${expertTensor} and the sum over an expert's parts comes between`;
	if (!activations[activation].fused)
		return `the activation is ${activations[activation].help}, not ${activationsThat("fused")}`;
	if (adapters) return "lora-target-modules names experts' projections, whose adapters stand between";
	if (masks) return "flextron is on and masks stand between the projections";
	return null;
}

export function expertLayerOf(c: TrainingConfiguration): ExpertLayer {
	return {
		expertTensor: c.llmExptTp,
		activation: activationOf(c),
		masks: c.flextron,
		adapters: c.loraRank !== null && c.loraTargetModules.some((module) => module.startsWith("experts.")),
	};
}

/** A line that says how the experts run and why; null without experts. */
export function describeExpertPath(c: TrainingConfiguration): string | null {
	if (!hasLayer(c.hybridLayerPattern, "moe")) return null;
	if (c.moeFusedMlp === "off") return "Experts: one operation after the other (moe-fused-mlp is off).";
	const obstacle = fusedMlpObstacle(expertLayerOf(c));
	if (obstacle !== null) return `Experts: one operation after the other, because ${obstacle}.`;
	const whole = `Experts: both products and the activation as one operation (moe-fused-mlp is ${c.moeFusedMlp})`;
	return c.fp8Modules.includes("experts") && c.fp8Format !== null
		? `${whole}, ${describeRounding(c, c.fp8Wgrad)}`
		: `${whole}.`;
}

/** A line that says how projections are rounded; null: they are not. */
export function describeProjections(c: TrainingConfiguration): string | null {
	if (c.fp8Format === null || !c.fp8Modules.includes("projections")) return null;
	return `Projections of the language model: ${describeRounding(c, false)}`;
}

function describeRounding(
	{ fp8Format, fp8Recipe, fp8Emulate }: TrainingConfiguration,
	weightGradients: boolean,
): string {
	const gradients = weightGradients ? "input and weight gradients" : "input gradients";
	return (
		`operands of products and ${gradients} rounded to ${fp8Format}, ${fp8Recipe}${fp8Emulate ? ", which is emulated" : ""}; ` +
		`${weightGradients ? "" : "weight gradients and "}master weights are not rounded.`
	);
}
