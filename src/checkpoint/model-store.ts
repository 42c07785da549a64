/**
 * A model's tensors as a checkpoint store, gathered from several ranks where its parts lie on them, and loading a store into
 * a model.
 */

import type { LogicalTensor } from "../models/module-parameters.ts";
import type { Device } from "../native/device.ts";
import { exchangeTexts, type Group, type ShardBlock } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { copyInto, elementCount, Tensor } from "../tensor/index.ts";
import { bytesOf } from "./dtype.ts";
import { compareTensors, requireMatch } from "./mapping.ts";
import { ConvertedStore, type TensorStore, type TensorType } from "./store.ts";
import { readRegion } from "./training/restore.ts";

/** A model whose tensors have full names. */
export interface NamedTensors {
	logicalTensors(): Iterable<LogicalTensor>;
}

/** Weights and buffers of a model that one process holds, fp32, read from the device when the store is opened. */
export class ValueStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #values = new Map<string, Float32Array>();

	constructor(
		readonly path: string,
		model: NamedTensors,
	) {
		const tensors = new Map<string, TensorType>();
		for (const tensor of model.logicalTensors()) {
			tensors.set(tensor.name, { dtype: "F32", shape: tensor.shape });
			const full = new Float32Array(elementCount(tensor.shape));
			copyBlocks(tensor.value.toFloat32(), tensor.value.width, full, fullWidth(tensor.shape), tensor.blocks, "to full");
			this.#values.set(tensor.name, full);
			tensor.value[Symbol.dispose]();
			tensor.gradient?.[Symbol.dispose]();
		}
		this.tensors = tensors;
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const values = this.#values.get(name)!;
		into.set(new Uint8Array(values.buffer, values.byteOffset + offset, into.byteLength));
	}

	[Symbol.dispose](): void {
		this.#values.clear();
	}
}

/** A model's main gradients in the place of its values, fp32; zeros for buffers and frozen parameters. */
export function gradientsOf(model: NamedTensors): NamedTensors {
	return {
		*logicalTensors() {
			for (const tensor of model.logicalTensors()) {
				const { value, gradient } = tensor;
				yield { ...tensor, value: gradient ?? Tensor.zeros(value.device, value.shape), gradient: null };
				value[Symbol.dispose]();
			}
		},
	};
}

/** Elements of a row of a tensor that is seen as [shape[0], rest]. */
export function fullWidth(shape: readonly number[]): number {
	return elementCount(shape.slice(1));
}

/** Copies the rectangles that a rank's [.., localWidth] values share with the whole [.., fullWidth] ones. */
export function copyBlocks<Values extends Float32Array | Uint16Array>(
	local: Values,
	localWidth: number,
	full: Values,
	wholeWidth: number,
	blocks: readonly ShardBlock[],
	direction: "to full" | "to local",
): void {
	for (const { localRow, fullRow, rows, localColumn, fullColumn, columns } of blocks) {
		for (let row = 0; row < rows; row++) {
			const at = (localRow + row) * localWidth + localColumn;
			const there = (fullRow + row) * wholeWidth + fullColumn;
			if (direction === "to full") full.set(local.subarray(at, at + columns), there);
			else local.set(full.subarray(there, there + columns), at);
		}
	}
}

/**
 * Fills this rank's part of a model from a store that holds exactly its tensors (or, with `partial`, at least them:
 * experts and modules of other ranks are there too). Missing, unexpected and mis-shaped ones are all named.
 */
export function loadModel(model: NamedTensors, from: TensorStore, partial = false): void {
	// Nothing computes in fp16; every value of it is one of fp32.
	const store = new ConvertedStore(from, (_, { dtype }) => (dtype === "F16" ? "F32" : dtype));
	const tensors = [...model.logicalTensors()];
	try {
		const found = compareTensors(store.tensors, new Map(tensors.map(({ name, shape }) => [name, shape])));
		requireMatch(store.path, partial ? { ...found, unexpected: [] } : found);
		for (const { name, shape, value, blocks } of tensors) {
			const { dtype } = store.tensors.get(name)!;
			if (dtype !== "F32" && dtype !== "BF16") {
				throw new UserError(`${name} in ${store.path} is ${dtype}; weights are F32, BF16 or F16.`);
			}
			const local = dtype === "F32" ? new Float32Array(value.elements) : new Uint16Array(value.elements);
			for (const block of blocks) readBlock(store, name, shape, block, local, value.width);
			using loaded = Tensor.from(value.device, local, value.shape);
			copyInto(loaded, value);
		}
	} finally {
		for (const { value, gradient } of tensors) {
			value[Symbol.dispose]();
			gradient?.[Symbol.dispose]();
		}
	}
}

/** Reads a rectangle of a tensor, and no more than the rows that it is of, into local values in rows of `width`. */
function readBlock(
	store: TensorStore,
	name: string,
	shape: readonly number[],
	{ localRow, fullRow, rows, localColumn, fullColumn, columns }: ShardBlock,
	local: Float32Array | Uint16Array,
	width: number,
): void {
	const whole = columns === fullWidth(shape);
	const box = {
		offsets: whole ? [fullRow, ...shape.slice(1).fill(0)] : [fullRow, fullColumn],
		sizes: whole ? [rows, ...shape.slice(1)] : [rows, columns],
	};
	if (columns === width) {
		readRegion(store, name, box, bytesOf(local.subarray(localRow * width, (localRow + rows) * width)));
		return;
	}
	const values = local instanceof Float32Array ? new Float32Array(rows * columns) : new Uint16Array(rows * columns);
	readRegion(store, name, box, bytesOf(values));
	for (let row = 0; row < rows; row++) {
		const own = values.subarray(row * columns, (row + 1) * columns);
		local.set(own, (localRow + row) * width + localColumn);
	}
}

/**
 * Every rank of `group` calls this together; the first gets the store, the others null. `counts`: of equal copies of a
 * part, whether this rank's is the one to take. A rank may have no part of any. Values are fp32, in host memory.
 */
export function gatherTensors(
	path: string,
	module: NamedTensors,
	group: Group,
	device: Device,
	counts: (tensor: LogicalTensor) => boolean,
): TensorStore | null {
	const own = new Map([...module.logicalTensors()].map((tensor) => [tensor.name, tensor]));
	const shapes = [...own.values()].map(({ name, shape }) => [name, shape] as const);
	const lists = exchangeTexts(group, JSON.stringify(shapes)).map((text) => JSON.parse(text) as typeof shapes);
	const tensors = new Map<string, TensorType>();
	for (const [name, shape] of lists.flat()) tensors.set(name, { dtype: "F32", shape });
	const values = new Map<string, Float32Array>();
	try {
		for (const [name, { shape }] of tensors) {
			const full = new Float32Array(elementCount(shape));
			const part = own.get(name);
			if (part && counts(part)) {
				copyBlocks(part.value.toFloat32(), part.value.width, full, fullWidth(shape), part.blocks, "to full");
			}
			const whole = sum(full, device, group);
			if (group.rank === 0) values.set(name, whole);
		}
	} finally {
		for (const { value, gradient } of own.values()) {
			value[Symbol.dispose]();
			gradient?.[Symbol.dispose]();
		}
	}
	if (group.rank !== 0) return null;
	return {
		path,
		tensors,
		readInto: (name, offset, into) => {
			const { buffer, byteOffset } = values.get(name)!;
			into.set(new Uint8Array(buffer, byteOffset + offset, into.byteLength));
		},
		[Symbol.dispose]: () => values.clear(),
	};
}

/** Parts do not overlap and the rest is zero: the sum is the whole. */
function sum(values: Float32Array, device: Device, group: Group): Float32Array {
	using all = Tensor.from(device, values);
	group.allReduce(all).wait();
	return all.toFloat32();
}

/** Whether a rank's part counts: of replicas, and of ranks that hold the same whole tensor, the first does. */
export function firstCopyCounts(ranks: {
	readonly dense: Group;
	readonly expert: Group;
	readonly tensor: Group;
}): (tensor: LogicalTensor) => boolean {
	return ({ name, shape, blocks }) => {
		const expert = name.includes(".experts.");
		const held = blocks.reduce((elements, { rows, columns }) => elements + rows * columns, 0);
		const first = (expert ? ranks.expert : ranks.dense).rank === 0;
		return first && (expert || held < elementCount(shape) || ranks.tensor.rank === 0);
	};
}
