/** A model's tensors with, without, and merged with those of its low-rank adapters. */
import { adapterName, adapterScale, isAdapterName } from "../../models/lora.ts";
import { UserError } from "../../system/errors.ts";
import { decodeFloats, dtypes, elementCount, encodeFloats, firstNotFinite } from "../dtype.ts";
import type { NamedTensors } from "../model-store.ts";
import { bytesOfType, type TensorStore, type TensorType, typeOf } from "../store.ts";

/** The tensors of the base: those that other checkpoints of the model have too. */
export function withoutAdapters(model: NamedTensors): NamedTensors {
	return select(model, (name) => !isAdapterName(name));
}

export function adaptersOf(model: NamedTensors): NamedTensors {
	return select(model, isAdapterName);
}

function select(model: NamedTensors, wanted: (name: string) => boolean): NamedTensors {
	return {
		*logicalTensors() {
			for (const tensor of model.logicalTensors()) {
				if (wanted(tensor.name)) {
					yield tensor;
					continue;
				}
				tensor.value[Symbol.dispose]();
				tensor.gradient?.[Symbol.dispose]();
			}
		},
	};
}

/** α / r of the adapters of a run or of a checkpoint; null without adapters. */
export function scaleOf(model: { readonly loraRank?: unknown; readonly loraAlpha?: unknown }): number | null {
	const { loraRank: rank, loraAlpha: alpha } = model;
	return typeof rank === "number" && typeof alpha === "number" ? adapterScale({ rank, alpha }) : null;
}

type Values = ArrayLike<number>;

/**
 * Weights with their low-rank adapters merged: W + (α / r) B A in the place of W, added up in float64 and rounded once to
 * the type in which W is stored.
 */
export class MergedStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	/** A of the weight that was read last: pieces of one weight are read in turn. */
	#latest: { readonly name: string; readonly a: Values } | null = null;

	/** Owns `source`. `scale`: α / r. Throws a UserError for an adapter whose weight is not there or does not fit. */
	constructor(
		readonly source: TensorStore,
		private readonly scale: number,
	) {
		this.tensors = new Map([...source.tensors].filter(([name]) => !isAdapterName(name)));
		const used = [...this.tensors].flatMap(([name, { shape }]) => {
			const [a, b] = [adapterName(name, "a"), adapterName(name, "b")];
			if (a === name || !source.tensors.has(a)) return [];
			const rank = typeOf(source, a).shape[0]!;
			const fits = [a, b].map((matrix) => typeOf(source, matrix).shape.join()).join(" by ");
			if (fits !== `${rank},${shape[1]} by ${shape[0]},${rank}`) {
				throw new UserError(`${source.path}: the adapter of ${name}, [${fits}], does not fit its shape [${shape}].`);
			}
			return [a, b];
		});
		const left = new Set([...source.tensors.keys()].filter(isAdapterName)).difference(new Set(used));
		for (const name of left) throw new UserError(`${source.path} has ${name}, but not the weight that it adapts.`);
	}

	get path(): string {
		return this.source.path;
	}

	originsOf(name: string): { store: TensorStore; name: string }[] {
		const names = this.isAdapted(name) ? [name, adapterName(name, "a"), adapterName(name, "b")] : [name];
		return names.map((origin) => ({ store: this.source, name: origin }));
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		if (!this.isAdapted(name)) {
			this.source.readInto(name, offset, into);
			return;
		}
		const type = typeOf(this.source, name);
		const bytes = dtypes[type.dtype].bits / 8;
		const first = Math.floor(offset / bytes);
		const last = Math.min(Math.ceil((offset + into.byteLength) / bytes), elementCount(type.shape)!);
		const values = Float64Array.from(this.#read(name, first, last));
		this.#addProduct(name, type.shape[1]!, first, values);
		const skip = offset - first * bytes;
		into.set(encodeFloats(type.dtype, values).subarray(skip, skip + into.byteLength));
	}

	/** values_i += scale (B A)_i of the elements from `first` on of a weight with rows of `width`. */
	#addProduct(name: string, width: number, first: number, values: Float64Array): void {
		const a = this.#a(name);
		const rank = a.length / width;
		const firstRow = Math.floor(first / width);
		const rows = Math.ceil((first + values.length) / width) - firstRow;
		const b = this.#read(adapterName(name, "b"), firstRow * rank, (firstRow + rows) * rank);
		const sums = new Float64Array(width);
		for (let row = 0; row < rows; row++) {
			sums.fill(0);
			for (let k = 0; k < rank; k++) {
				const factor = b[row * rank + k]!;
				for (let column = 0; column < width; column++) sums[column]! += factor * a[k * width + column]!;
			}
			const start = (firstRow + row) * width - first;
			for (let column = Math.max(0, -start); column < width && start + column < values.length; column++) {
				values[start + column]! += this.scale * sums[column]!;
			}
		}
	}

	#a(name: string): Values {
		if (this.#latest?.name !== name) {
			const a = adapterName(name, "a");
			this.#latest = { name, a: this.#read(a, 0, elementCount(typeOf(this.source, a).shape)!) };
		}
		return this.#latest.a;
	}

	/** Elements [begin, end) of a stored tensor. */
	#read(name: string, begin: number, end: number): Values {
		const { dtype, shape } = typeOf(this.source, name);
		const bytes = bytesOfType({ dtype, shape }) / elementCount(shape)!;
		const stored = new Uint8Array((end - begin) * bytes);
		this.source.readInto(name, begin * bytes, stored);
		return decodeFloats(dtype, stored);
	}

	/** Whether a weight has an adapter. */
	isAdapted(name: string): boolean {
		const a = adapterName(name, "a");
		return a !== name && this.source.tensors.has(a);
	}

	[Symbol.dispose](): void {
		this.source[Symbol.dispose]();
	}
}

/**
 * The weights that are made of merged ones, such as in another type, with a check of their values when they are read: an infinity
 * or a NaN in a weight with an adapter is a UserError.
 */
export function requireFinite(weights: TensorStore, merged: MergedStore): TensorStore {
	return {
		path: weights.path,
		tensors: weights.tensors,
		originsOf: (name) => [{ store: weights, name }],
		readInto: (name, offset, into) => {
			weights.readInto(name, offset, into);
			if (!merged.isAdapted(name)) return;
			const { dtype } = typeOf(weights, name);
			const size = dtypes[dtype].bits / 8;
			const first = Math.ceil(offset / size);
			const at = firstNotFinite(dtype, into.subarray(first * size - offset));
			if (at < 0) return;
			throw new UserError(
				`${weights.path}: with its adapter merged, ${name} has an infinite value or NaN as element ${first + at}.`,
			);
		},
		[Symbol.dispose]: () => weights[Symbol.dispose](),
	};
}

/** A store whose adapters are merged, where it has any. `scale`: of their products; null: no adapters are expected. */
export function mergeAdapters(store: TensorStore, scale: number | null): TensorStore {
	return scale === null ? store : new MergedStore(store, scale);
}
