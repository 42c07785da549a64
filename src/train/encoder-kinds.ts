/** The kinds of encoders that `modules` names: their parts, and what they read of a sample. Adding one: docs/add-an-encoder.md. */
import type { ModuleConfiguration } from "../config/modules.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { drawnFrames, frameSet, storedFrames } from "../data/frames.ts";
import type { ImageSet } from "../data/images.ts";
import { frameTower } from "../models/frames/tower.ts";
import type { PatchGrid, Tower } from "../models/tower.ts";
import type { EncoderParts } from "../models/vision/encoder.ts";
import { newProjector } from "../models/vision/projector.ts";

export interface EncoderKind {
	readonly tower: (m: ModuleConfiguration, options: Pick<Tower, "dtype"> & { readonly initMethodStd: number }) => Tower;
	/** The one item of a sample. */
	readonly grid: (m: ModuleConfiguration) => PatchGrid;
	/** Opens its input; samples are read by number. `seed`: of input that is drawn. */
	readonly open: (m: ModuleConfiguration, seed: number) => (first: number, count: number) => ImageSet;
}

export const encoderKinds: Readonly<Record<ModuleConfiguration["kind"], EncoderKind>> = {
	mlp: {
		tower: ({ name, frameWidth, hiddenSize }, options) => frameTower({ name, frameWidth, hiddenSize, ...options }),
		grid: ({ frames }) => ({ rows: frames, columns: 1 }),
		open: ({ frames, frameWidth: width, dataPath }, seed) => {
			const size = { frames, width };
			const read = dataPath === null ? drawnFrames(size, seed) : storedFrames(size, dataPath);
			return (first, count) => frameSet(size, read, first, count);
		},
	},
};

/** The parts of an encoder of `modules`. */
export function partsOf(m: ModuleConfiguration, c: TrainingConfiguration): EncoderParts {
	const { name, precision, projectionFfnHiddenSize: inner } = m;
	const initMethodStd = m.initMethodStd ?? c.initMethodStd;
	const bf16 = precision === null ? c.bf16 : precision === "bf16";
	const tower = encoderKinds[m.kind].tower(m, { dtype: bf16 ? "bf16" : "f32", initMethodStd });
	const projector = newProjector({ inputSize: tower.outputWidth, outputSize: c.hiddenSize, inner, initMethodStd });
	return { name, tower, projector };
}
