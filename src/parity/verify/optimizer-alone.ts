/**
 * The optimizer on its own: given gradients in, updated weights out. Judged apart from a real step, because Adam turns
 * the rounding noise of a gradient that is zero into a full step.
 */
import { copyBlocks } from "../../checkpoint/index.ts";
import { copyInto, elementCount, Tensor } from "../../tensor/index.ts";
import type { Engine } from "./engine.ts";
import type { Subject } from "./subject.ts";

/**
 * Starts again from the initial weights and makes one update from gradients given by name (whole tensors, before
 * clipping). `clipFactor`: factor of every gradient.
 */
export function updateAlone(
	engine: Engine,
	subject: Subject,
	given: { readonly gradientOf: (name: string) => Float32Array; readonly clipFactor: number },
): void {
	engine.restart();
	const { replicas, optimizer, scalars } = engine.state;
	for (const { parameters } of replicas) parameters.zeroGradients();
	for (const { name, shape, value, gradient, blocks } of engine.tensors()) {
		if (gradient) {
			const local = new Float32Array(gradient.elements);
			const width = elementCount(shape.slice(1));
			copyBlocks(local, gradient.width, given.gradientOf(name), width, blocks, "to local");
			using own = Tensor.from(gradient.device, local, gradient.shape);
			copyInto(own, gradient);
			gradient[Symbol.dispose]();
		}
		value[Symbol.dispose]();
	}
	scalars.set("foundInf", 0);
	scalars.set("clipFactor", given.clipFactor);
	scalars.set("learningRate", subject.learningRate);
	scalars.set("weightDecay", subject.weightDecay);
	optimizer.step();
	for (const replica of replicas) replica.gather();
}
