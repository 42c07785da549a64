/** Finds what first became NaN or infinite, to name it. */
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { Device } from "../native/device.ts";
import { Tensor } from "../tensor/tensor.ts";
import { evaluate } from "./evaluate.ts";

/** Names the parameter, layer or gradient that holds the first value that is not finite. Weights must be the step's. */
export function describeNonFinite(model: HybridModel, microbatches: readonly Microbatch[]): string {
	for (const { name, value } of model.parameters) {
		if (!allFinite(model.device, value)) return `parameter ${name} already was not finite`;
	}
	let first: string | null = null;
	evaluate(model, microbatches, {
		observe: (name, value) => {
			if (first === null && !allFinite(model.device, value)) first = name;
		},
	});
	if (first !== null) return `the first layer whose output is not finite is ${describeLayer(model, first)}`;
	const gradients = [...model.parameters].filter(
		({ mainGradient }) => mainGradient !== null && !allFinite(model.device, mainGradient),
	);
	// Backward runs from the last layer to the first, so the last parameter is where it began.
	return gradients.length > 0
		? `the forward pass is finite, the first gradient that is not is that of ${gradients.at(-1)!.name}`
		: "every value looked at is finite";
}

function describeLayer(model: HybridModel, name: string): string {
	const layer = /^layer\.(\d+)$/.exec(name);
	if (!layer) return name;
	const kinds = { M: "Mamba-2", "*": "attention", "-": "MLP", E: "mixture of experts" };
	return `layer ${layer[1]} (${kinds[model.config.pattern[Number(layer[1])]!]})`;
}

function allFinite(device: Device, value: Tensor): boolean {
	using flag = Tensor.zeros(device, [1], "i32");
	device.run("find_nonfinite", { x: value, flag, elements: value.elements, dtype: value.dtypeCode });
	return flag.item() === 0;
}
