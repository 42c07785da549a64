/**
 * The parameters of a module on one rank: memory for its shards, initial values, and the mapping to whole tensors by full name.
 */
import type { Device } from "../native/device.ts";
import {
	type BucketSize,
	localShape,
	type ParameterRequest,
	ParameterSet,
	type ShardBlock,
	type ShardPlace,
	shardBlocks,
} from "../parallel/index.ts";
import { elementCount, type FloatDtype, type Parameter, type Tensor } from "../tensor/index.ts";
import { initialise, philoxKey } from "./initialise.ts";
import {
	decays,
	logicalNames,
	logicalShape,
	type MatrixOptions,
	matrixLayout,
	type ParameterSpec,
} from "./parameter-spec.ts";

/** A rank's position among the shards of a module. */
export interface ModulePlace {
	/** Among the shards of dense parameters. */
	readonly tensor: ShardPlace;
	/** Among the shards of an expert. */
	readonly expertTensor: ShardPlace;
	/** Among the ranks with different experts. */
	readonly expert: ShardPlace;
}

/** A rank's part of a tensor by its full name. The receiver disposes value and gradient. */
export interface LogicalTensor {
	readonly name: string;
	/** Unsharded shape, without padding. */
	readonly shape: readonly number[];
	/** The local tensor as [rows, columns]. */
	readonly value: Tensor;
	/** fp32, of the same shape; null if frozen or a buffer. */
	readonly gradient: Tensor | null;
	/** The rectangles of the unsharded tensor, seen as [shape[0], rest], that the local tensor holds. */
	readonly blocks: readonly ShardBlock[];
}

export class ModuleParameters implements Disposable {
	readonly set: ParameterSet;

	constructor(
		readonly device: Device,
		readonly specs: readonly ParameterSpec[],
		readonly place: ModulePlace,
		options: {
			readonly dtype: FloatDtype;
			readonly frozen: (spec: ParameterSpec) => boolean;
			/** Data-parallel replicas that may share optimizer state; buffers are padded to as many equal slices. */
			readonly replicas?: { readonly dense: number; readonly expert: number };
			/** Default: one buffer for each kind. */
			readonly buckets?: BucketSize;
			/** How Muon reads them as matrices; null or absent: AdamW updates all of them. */
			readonly matrices?: MatrixOptions | null;
		},
	) {
		this.set = new ParameterSet(
			device,
			specs.map(
				(spec): ParameterRequest => ({
					name: spec.name,
					shape: this.#stacked(spec),
					dtype: spec.alwaysF32 ? "f32" : options.dtype,
					decays: decays(spec),
					expert: spec.experts !== undefined,
					// Adapters of experts are not sharded over an expert's tensor-parallel ranks.
					replicated: spec.shard.kind === "replicated" && spec.experts === undefined,
					copy: spec.copy === undefined ? "none" : spec.copy.counted ? "counted" : "uncounted",
					frozen: options.frozen(spec),
					matrix: options.matrices && !options.frozen(spec) ? matrixLayout(spec, options.matrices) : null,
				}),
			),
			options.replicas,
			options.buckets,
		);
	}

	get(name: string): Parameter {
		return this.set.get(name);
	}

	/** Draws initial values from `seed`; the layout does not change them. */
	initialise(seed: number): void {
		for (const spec of this.specs) {
			const { value } = this.set.get(spec.name);
			const fullWidth = elementCount(spec.shape.slice(1));
			for (const { name, index } of this.#names(spec)) {
				using part = this.#part(value, spec, index);
				for (const block of this.#blocks(spec)) {
					using rectangle = rectangleOf(part, block);
					initialise(this.device, rectangle, spec.initialisation, philoxKey(seed, name), {
						firstRow: block.fullRow,
						rows: block.rows,
						firstColumn: block.fullColumn,
						columns: block.columns,
						fullWidth,
					});
				}
			}
		}
	}

	/** This rank's part of every parameter by full name, experts one by one. */
	*logicalTensors(): Generator<LogicalTensor> {
		for (const spec of this.specs) {
			const { value, mainGradient } = this.set.get(spec.name);
			for (const { name, index } of this.#names(spec)) {
				yield {
					name,
					shape: logicalShape(spec),
					value: this.#part(value, spec, index),
					gradient: mainGradient && this.#part(mainGradient, spec, index),
					blocks: this.#blocks(spec),
				};
			}
		}
	}

	[Symbol.dispose](): void {
		this.set[Symbol.dispose]();
	}

	#placeOf(spec: ParameterSpec): ShardPlace {
		return spec.experts === undefined ? this.place.tensor : this.place.expertTensor;
	}

	#local(spec: ParameterSpec): number[] {
		return localShape(spec.shape, spec.shard, this.#placeOf(spec).size, spec.name);
	}

	#blocks(spec: ParameterSpec): ShardBlock[] {
		return shardBlocks(spec.shape, spec.shard, this.#placeOf(spec), spec.liveRows);
	}

	/** Local shape, with this rank's experts stacked. */
	#stacked(spec: ParameterSpec): number[] {
		if (spec.experts === undefined) return this.#local(spec);
		const { size } = this.place.expert;
		if (spec.experts % size !== 0) {
			throw new RangeError(`${spec.name}: ${spec.experts} experts cannot be divided over ${size} ranks.`);
		}
		return [spec.experts / size, ...this.#local(spec)];
	}

	/** Full names of this rank's tensors of a spec, and their index in its stack. */
	#names(spec: ParameterSpec): { readonly name: string; readonly index: number }[] {
		const names = logicalNames(spec);
		if (spec.experts === undefined) return [{ name: names[0]!, index: 0 }];
		const { rank, size } = this.place.expert;
		const count = spec.experts / size;
		return names.slice(rank * count, (rank + 1) * count).map((name, index) => ({ name, index }));
	}

	/** One logical tensor as a view [rows, columns] of the spec's memory. */
	#part(whole: Tensor, spec: ParameterSpec, index: number): Tensor {
		const [rows, ...rest] = this.#local(spec) as [number, ...number[]];
		using matrix = whole.view([whole.elements / elementCount(rest), elementCount(rest)]);
		return matrix.rowsFrom(index * rows, rows);
	}
}

/** The window of a local tensor that a block covers. */
function rectangleOf(part: Tensor, block: ShardBlock): Tensor {
	using rows = part.rowsFrom(block.localRow, block.rows);
	return rows.columns(block.localColumn, block.columns);
}
