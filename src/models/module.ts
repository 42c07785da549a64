/** A part of a model that trains on a grid of ranks of its own: an encoder, or the language model. */
import type { ModelParallel, ParameterSet } from "../parallel/index.ts";
import type { LogicalTensor } from "./module-parameters.ts";

export interface Module extends Disposable {
	readonly parallel: ModelParallel;
	readonly parameters: ParameterSet;
	/** Draws initial values from `seed`; the layout does not change them. */
	initialise(seed: number): void;
	/** This rank's part of every tensor of the module. The caller disposes them. */
	logicalTensors(): Generator<LogicalTensor>;
}
