/**
 * An encoder, tower and projector, as one set of parameters on one grid of ranks: items (images, sounds) in, rows of the language
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
import { type PipelineSegment, wholeModel } from "../language/pipeline-segments.ts";
import { isAdapterName } from "../lora.ts";
import type { Module } from "../module.ts";
import { type LogicalTensor, ModuleParameters } from "../module-parameters.ts";
import type { MatrixOptions } from "../parameter-spec.ts";
import type { EncoderObserver, PatchGrid, Tower } from "../tower.ts";
import type { VitConfig } from "../vit/config.ts";
import { arrangeRows, rowsByItem } from "./pictures.ts";
import { newlineName, type ProjectorConfig, project, projectorParameters, rowWidth } from "./projector.ts";

/** Beginning of the names of an encoder's tensors. */
export function encoderPrefix(name: string): string {
	return `modality_submodules.${name}.`;
}

/** Configuration of the vision encoder. */
export interface EncoderConfig {
	readonly tower: VitConfig;
	readonly projector: ProjectorConfig;
}

/** The parts of any encoder. */
export interface EncoderParts {
	/** Name of its grid. */
	readonly name: string;
	readonly tower: Tower;
	readonly projector: ProjectorConfig;
}

export interface EncoderInput {
	/** Patches of all items, [Σ rows · columns, patchWidth], f32 or the encoder's dtype; behind the first stage the stream before. */
	readonly patches: Tensor;
	readonly grids: readonly PatchGrid[];
	/** Philox key of the step's random choices, such as crops of the position table. */
	readonly cropKey: number;
	/** Index of each item in the step's global batch; random choices follow it, so that no layout changes them. */
	readonly indices: readonly number[];
}

export class EncoderModule implements Module {
	readonly #parameters: ModuleParameters;
	/** Default: no model parallelism. */
	readonly parallel: ModelParallel;
	/** This rank's part of the tower; the projector follows its last segment. */
	readonly segment: PipelineSegment;

	constructor(
		readonly device: Device,
		readonly config: EncoderParts,
		readonly options: {
			readonly frozenTower: boolean;
			readonly frozenProjector: boolean;
			readonly parallel?: ModelParallel;
			/** Default: all of the tower. */
			readonly segment?: PipelineSegment;
			/** Data-parallel replicas; default 1. */
			readonly replicas?: { readonly dense: number; readonly expert: number };
			/** Gradient buckets; default: one buffer for each kind. */
			readonly buckets?: BucketSize;
			/** How Muon reads weights as matrices; null or absent: AdamW updates all of them. */
			readonly matrices?: MatrixOptions | null;
		},
	) {
		const { name: encoder, tower, projector } = config;
		if (projector.inputSize * (1 + projector.deepstack.count) !== tower.outputWidth) {
			throw new RangeError(`A projector of ${projector.inputSize} inputs cannot read ${tower.outputWidth} features.`);
		}
		this.parallel = options.parallel ?? noModelParallel("encoder", 0);
		this.segment = options.segment ?? wholeModel(tower.stream?.layers ?? 0);
		const ofProjector = projectorParameters(projector, encoder);
		const specs = [...tower.parameters(this.segment), ...(this.segment.hasHead ? ofProjector : [])];
		const projectorNames = new Set(ofProjector.map(({ name }) => name));
		this.#parameters = new ModuleParameters(device, specs, placeOf(this.parallel), {
			...options,
			dtype: tower.dtype,
			frozen: ({ name }) => {
				const projects = projectorNames.has(name);
				const { lora } = projects ? projector : tower;
				const frozen = projects ? options.frozenProjector : options.frozenTower;
				return frozen || (lora !== null && !isAdapterName(name));
			},
		});
	}

	get parameters(): ParameterSet {
		return this.#parameters.set;
	}

	/** Width of the rows that this rank's stage gives. */
	get width(): number {
		const { tower, projector } = this.config;
		return this.segment.hasHead ? rowWidth(projector) : tower.stream!.widthBehind(this.segment.end);
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
	 * Rows_RH of all items in order, on each tensor-parallel rank; before the last stage, its stream. Without items there are no rows and no parameter is used (all
	 * ranks of a tensor-parallel group see the same items).
	 */
	forward(tape: Tape, { patches, grids, cropKey, indices }: EncoderInput, observe?: EncoderObserver): Tensor {
		const { tower } = this.config;
		if (grids.length === 0) return Tensor.empty(this.device, [0, this.width], tower.dtype);
		// A frozen tower makes no random choices.
		const random = tape.training && !this.options.frozenTower ? { key: cropKey, indices } : null;
		using features = tower.forward(tape, this.#place, { patches, grids, random }, observe);
		return this.segment.hasHead ? this.project(tape, features, observe) : features.share();
	}

	/** The frozen tower's features, before the projector, of at least one item. */
	frozenFeatures(patches: Tensor, grids: readonly PatchGrid[]): Tensor {
		if (!this.options.frozenTower) throw new Error("The tower trains: its features are of one step alone.");
		const tape = new Tape(this.device, { recording: false });
		return this.config.tower.forward(tape, this.#place, { patches, grids, random: null });
	}

	/** Projects the tower's features to rows of the language model's width; the features stay the caller's. */
	project(tape: Tape, features: Tensor, observe?: EncoderObserver): Tensor {
		return project(tape, this.config, this.#place, features, observe);
	}

	/** Rows of the text of every item, in which a picture's stand with its first. */
	rowsPerItem(grids: readonly PatchGrid[]): number[] {
		const { tower, projector } = this.config;
		return projector.newline
			? rowsByItem(grids, (grid) => tower.rowsOf(grid))
			: grids.map((grid) => tower.rowsOf(grid));
	}

	/** The projected rows of all items, which are taken over, as rows of the text. */
	arrange(tape: Tape, rows: Tensor, grids: readonly PatchGrid[]): Tensor {
		const { name, projector } = this.config;
		if (!projector.newline || !this.segment.hasHead || grids.length === 0) return rows;
		using _rows = rows;
		return arrangeRows(tape, rows, this.#parameters.get(newlineName(name)), grids);
	}

	get #place() {
		return { device: this.device, tp: this.parallel.tp, parameters: this.#parameters, segment: this.segment };
	}

	[Symbol.dispose](): void {
		this.#parameters[Symbol.dispose]();
	}
}
