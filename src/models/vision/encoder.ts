/**
 * The encoder module, RADIO tower and projector, as one set of parameters on one grid of ranks: images in, rows of the language
 * model's width out.
 */
import type { Device } from "../../native/device.ts";
import {
	type BucketSize,
	type ModelParallel,
	noModelParallel,
	type ParameterSet,
	placeOf,
} from "../../parallel/index.ts";
import { Tape, Tensor } from "../../tensor/index.ts";
import { isAdapterName } from "../lora.ts";
import type { Module } from "../module.ts";
import { type LogicalTensor, ModuleParameters } from "../module-parameters.ts";
import { checkRadioConfig, outputWidth, type PatchGrid, type RadioConfig } from "../radio/config.ts";
import { RadioModel, type RadioObserver } from "../radio/model.ts";
import { radioParameters } from "../radio/names.ts";
import { PackedImages } from "../radio/packing.ts";
import { cropOfImage } from "../radio/random-crop.ts";
import { type ProjectorConfig, project, projectorParameters, projectorPrefix } from "./projector.ts";

/** What the names of an encoder's tensors begin with. */
export function encoderPrefix(name: string): string {
	return `modality_submodules.${name}.`;
}

export interface EncoderConfig {
	readonly tower: RadioConfig;
	readonly projector: ProjectorConfig;
}

export interface EncoderInput {
	/** Patches of all images, [Σ rows · columns, 3p²], f32 or the encoder's dtype. */
	readonly patches: Tensor;
	readonly grids: readonly PatchGrid[];
	/** Philox key of the step's random crops of the position table. */
	readonly cropKey: number;
	/** Index of each image in the step's global batch; crops follow it, so that no layout changes them. */
	readonly indices: readonly number[];
}

export class EncoderModule implements Module {
	readonly #parameters: ModuleParameters;
	readonly #tower: RadioModel;
	/** Default: no model parallelism. */
	readonly parallel: ModelParallel;

	constructor(
		readonly device: Device,
		readonly config: EncoderConfig,
		readonly options: {
			readonly frozenTower: boolean;
			readonly frozenProjector: boolean;
			readonly parallel?: ModelParallel;
			/** Data-parallel replicas; default 1. */
			readonly replicas?: { readonly dense: number; readonly expert: number };
			/** Gradient buckets; default: one buffer for each kind. */
			readonly buckets?: BucketSize;
		},
	) {
		checkRadioConfig(config.tower);
		if (config.projector.inputSize !== outputWidth(config.tower)) {
			throw new RangeError(
				`A projector of ${config.projector.inputSize} inputs cannot read ${outputWidth(config.tower)} features.`,
			);
		}
		this.parallel = options.parallel ?? noModelParallel("encoder", 0);
		const specs = [...radioParameters(config.tower), ...projectorParameters(config.projector)];
		this.#parameters = new ModuleParameters(device, specs, placeOf(this.parallel), {
			...(options.replicas ? { replicas: options.replicas } : {}),
			...(options.buckets ? { buckets: options.buckets } : {}),
			dtype: config.tower.dtype,
			frozen: ({ name }) => {
				const ofProjector = name.startsWith(projectorPrefix);
				const { lora } = ofProjector ? config.projector : config.tower;
				const frozen = ofProjector ? options.frozenProjector : options.frozenTower;
				return frozen || (lora !== null && !isAdapterName(name));
			},
		});
		this.#tower = new RadioModel(config.tower, this.parallel.tp, this.#parameters);
	}

	get parameters(): ParameterSet {
		return this.#parameters.set;
	}

	/** Width of the rows. */
	get width(): number {
		return this.config.projector.outputSize;
	}

	/** Draws initial values from `seed`. */
	initialise(seed: number): void {
		this.#parameters.initialise(seed);
	}

	/** This rank's part of every tensor of the module. The caller disposes them. */
	logicalTensors(): Generator<LogicalTensor> {
		return this.#parameters.logicalTensors();
	}

	/**
	 * Rows_RH of all images in order, on each tensor-parallel rank; rowsPerImage gives each image's number. Without images there
	 * are no rows and no parameter is used (all ranks of a tensor-parallel group see the same images).
	 */
	forward(tape: Tape, input: EncoderInput, observe?: RadioObserver): EncodedImages {
		const { tower } = this.config;
		if (input.grids.length === 0) {
			return { rows: Tensor.empty(this.device, [0, this.width], tower.dtype), rowsPerImage: [] };
		}
		using packed = new PackedImages(this.device, tower, input.grids, this.#crops(tape, input));
		using features = this.#tower.forward(tape, input.patches, packed, observe);
		return this.project(tape, { features, rowsPerImage: packed.rowsPerImage }, observe);
	}

	/** The frozen tower's features, before the projector, of at least one image. */
	frozenFeatures(patches: Tensor, grids: readonly PatchGrid[]): EncodedFeatures {
		if (!this.options.frozenTower) throw new Error("The tower trains: its features are of one step alone.");
		using packed = new PackedImages(this.device, this.config.tower, grids, null);
		const tape = new Tape(this.device, { recording: false });
		return { features: this.#tower.forward(tape, patches, packed), rowsPerImage: packed.rowsPerImage };
	}

	/** Projects the tower's features to rows of the language model's width; the features stay the caller's. */
	project(tape: Tape, { features, rowsPerImage }: EncodedFeatures, observe?: RadioObserver): EncodedImages {
		const rows = project(tape, this.config.projector, this.#parameters, features, this.parallel.tp);
		observe?.("projector", rows);
		return { rows, rowsPerImage };
	}

	/**
	 * Random windows of the position table, if the tower trains; a frozen tower always uses the whole table (docs/spec/vision.md
	 * §1.8).
	 */
	#crops(tape: Tape, { cropKey, indices }: EncoderInput) {
		const { mode, randomCrop } = this.config.tower.positions;
		if (mode !== "cpe" || !randomCrop || !tape.training || this.options.frozenTower) return null;
		return indices.map((index) => cropOfImage(cropKey, index));
	}

	[Symbol.dispose](): void {
		this.#parameters[Symbol.dispose]();
	}
}

export interface EncodedFeatures {
	/** [Σ rowsPerImage, width of the tower's output]. The receiver disposes it. */
	readonly features: Tensor;
	readonly rowsPerImage: readonly number[];
}

export interface EncodedImages {
	/** [Σ rowsPerImage, H]. The receiver disposes it. */
	readonly rows: Tensor;
	readonly rowsPerImage: readonly number[];
}
