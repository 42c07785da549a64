/** A torch_dist checkpoint that a run starts from, read as if it had been converted to the native format first. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import {
	detectFormat,
	iterationName,
	type Manifest,
	openSource,
	type Start,
	type TensorStore,
} from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { UserError } from "../../system/errors.ts";

/** Parts of a checkpoint that a run reads, whatever its format. */
export interface StoredTraining extends TensorStore {
	readonly manifest: Pick<Manifest, "iteration" | "model" | "common" | "source" | "objects">;
	readObject(name: string): Uint8Array;
}

export interface MegatronTraining extends StoredTraining {
	/** Sentences about the checkpoint, by which nothing is lost. */
	readonly notices: readonly string[];
	/** Sentences about what is lost, or is not what was asked for. */
	readonly warnings: readonly string[];
	/** Draws the initial values of layers that the checkpoint lacks; to be awaited before values are read. */
	readonly prepare: () => Promise<void>;
}

export function isMegatron(path: string): boolean {
	return detectFormat(path) === "torch_dist";
}

/**
 * Opens the checkpoint; where it does not say how its layers are grouped, or is of a GPT model, the configuration's
 * hybrid-layer-pattern does. Values are checked as they are read.
 */
export function openMegatron(
	c: TrainingConfiguration,
	{ path, iteration }: Pick<Start, "path" | "iteration">,
	optimizer: boolean,
): MegatronTraining {
	const folder = iteration === null ? path : join(path, iterationName(iteration));
	if (!existsSync(folder)) throw new UserError(`${path} has no checkpoint of step ${iteration}.`);
	const source = openSource(folder, "torch_dist", {
		...{ optimizer, allowFallback: false, visionHeads: null, inert: [] },
		pattern: c.hybridLayerPattern,
		newLayers: {
			seed: c.seed,
			sizes: {
				mamba_num_heads: c.mambaNumHeads,
				mamba_head_dim: c.mambaHeadDim,
				mamba_num_groups: c.mambaNumGroups,
				mamba_state_dim: c.mambaStateDim,
			},
		},
	});
	const { weights, model, common, spelling, notices, warnings } = source;
	return {
		path: source.path,
		tensors: weights.tensors,
		readInto: (name, offset, into) => weights.readInto(name, offset, into),
		manifest: { iteration: source.iteration, model, common, source: spelling, objects: {} },
		readObject: (name) => {
			throw new RangeError(`${source.path} has no object ${name}.`);
		},
		notices,
		warnings,
		prepare: async () => await source.prepare?.(),
		[Symbol.dispose]: () => source[Symbol.dispose](),
	};
}

/** Throws a UserError where a run would save into a folder of torch_dist checkpoints; its own are native. */
export function requireOtherFolder(save: string | null): void {
	if (save === null || !isMegatron(save)) return;
	throw new UserError(`--save ${save} holds a torch_dist checkpoint, and this run's are native: name another folder.`);
}
