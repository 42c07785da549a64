/** Finds the first NaN or infinity of a failed step: parameter, activation or gradient. */

import type { LayerKind } from "../../config/hybrid-pattern.ts";
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import { kinds } from "../../models/language/kinds/index.ts";
import type { Device } from "../../native/device.ts";
import type { Group, ParameterSet } from "../../parallel/index.ts";
import { Tensor } from "../../tensor/index.ts";
import { type EvaluationState, evaluate } from "../evaluate.ts";

export interface InspectedState extends EvaluationState {
	/** Parameters of the modules on this rank. */
	readonly parameters: readonly ParameterSet[];
	/** Layers of the language model on this rank. */
	readonly pattern: readonly LayerKind[];
}

/**
 * Names the parameter, layer or gradient with the first non-finite value; weights must be those of the step. Collective over the
 * run. A rank that finds nothing while another does never returns: the run ends with the other's error.
 */
export function describeNonFinite(state: InspectedState, microbatches: readonly ImageTextMicrobatch[]): string {
	const { world, parameters } = state;
	const { device } = state.scalars;
	const all = parameters.flatMap((set) => [...set]);
	const weight = all.find(({ value }) => !allFinite(device, value));
	if (someoneFound(world, weight !== undefined)) return `parameter ${weight!.name} already was not finite`;
	let first: string | null = null;
	evaluate(state, microbatches, (name, value) => {
		if (first === null && !allFinite(device, value)) first = name;
	});
	if (someoneFound(world, first !== null)) {
		return `the first layer whose output is not finite is ${describeLayer(state, first!)}`;
	}
	// Backward runs from the last layer to the first, so the last parameter with a non-finite gradient is the first that it
	// reached.
	const gradient = all.findLast(({ mainGradient }) => mainGradient !== null && !allFinite(device, mainGradient));
	if (!someoneFound(world, gradient !== undefined)) return "every value looked at is finite";
	return `the forward pass is finite, the first gradient that is not is that of ${gradient!.name}`;
}

/** Whether this rank has found something; if only others have, waits for the run to end. */
function someoneFound(world: Group, own: boolean): boolean {
	const anyone = world.exchange(Int32Array.of(own ? 1 : 0)).some(([found]) => found === 1);
	if (anyone && !own) world.barrier();
	return own;
}

function describeLayer({ pattern }: InspectedState, name: string): string {
	const [, encoder, layer] = /^(radio_encoder\.)?layer\.(\d+)$/.exec(name) ?? [];
	if (layer === undefined) return name;
	if (encoder !== undefined) return `layer ${layer} of the vision tower`;
	return `layer ${layer} (${kinds[pattern[Number(layer)]!].title})`;
}

function allFinite(device: Device, value: Tensor): boolean {
	using flag = Tensor.zeros(device, [1], "i32");
	device.run("find_nonfinite", { x: value, flag, elements: value.elements, dtype: value.dtypeCode });
	return flag.item() === 0;
}
