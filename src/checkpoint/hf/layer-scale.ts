/**
 * Layer scale of a RADIO tower under transformers' names: a block adds λ · branch(x) to its input, where Megatron's adds
 * branch(x). The branch ends in a projection, so λ belongs to the rows of its weight and to its bias. They are multiplied
 * in float64 and rounded once to the dtype that is stored; where λ is 1 the values stay as they are.
 */
import { UserError } from "../../system/errors.ts";
import { decodeFloats, dtypes, elementCount, encodeFloats, isFloatDtype } from "../dtype.ts";
import { bytesOfType, readTensor, type TensorStore, type TensorType, typeOf } from "../store.ts";

const scaleName = /^(.*\.)layer_scale([12])\.lambda1$/;
/** Projections at the end of the two branches, inside a block. */
const projections: Readonly<Record<string, readonly string[]>> = {
	1: ["attention.output.dense", "attention.o_proj", "attn.proj"],
	2: ["mlp.fc2"],
};

/** The projection's tensors by the scale that multiplies their rows. */
function scaledTensors(store: TensorStore): ReadonlyMap<string, string> {
	const scaleOf = new Map<string, string>();
	for (const [scale, { dtype, shape }] of store.tensors) {
		const [, block, branch] = scaleName.exec(scale) ?? [];
		if (block === undefined) continue;
		const found = projections[branch!]!.flatMap((name) => [`${block}${name}.weight`, `${block}${name}.bias`]).filter(
			(name) => store.tensors.has(name),
		);
		const fits = (name: string) => {
			const type = store.tensors.get(name)!;
			return type.shape[0] === shape[0] && isFloatDtype(type.dtype);
		};
		if (found.length === 0 || shape.length !== 1 || !isFloatDtype(dtype) || !found.every(fits)) {
			throw new UserError(`${store.path}: ${scale} of shape [${shape}] ${dtype} scales no projection of its block.`);
		}
		for (const name of found) scaleOf.set(name, scale);
	}
	return scaleOf;
}

/** A store without layer scales: the tensors that they multiply come multiplied. Owns the store it reads from. */
export class LayerScaledStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	/** Names of the scales. */
	readonly scales: readonly string[];
	readonly #scaleOf: ReadonlyMap<string, string>;
	readonly #values = new Map<string, ArrayLike<number>>();

	constructor(readonly source: TensorStore) {
		this.#scaleOf = scaledTensors(source);
		this.scales = [...new Set(this.#scaleOf.values())];
		const left = new Set(this.scales);
		this.tensors = new Map([...source.tensors].filter(([name]) => !left.has(name)));
	}

	get path(): string {
		return this.source.path;
	}

	originsOf(name: string): { store: TensorStore; name: string }[] {
		const scale = this.#scaleOf.get(name);
		const names = scale === undefined ? [name] : [name, scale];
		return names.map((origin) => ({ store: this.source, name: origin }));
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const scale = this.#scaleOf.get(name);
		if (scale === undefined) {
			this.source.readInto(name, offset, into);
			return;
		}
		const type = typeOf(this.source, name);
		const bytes = dtypes[type.dtype].bits / 8;
		const width = elementCount(type.shape.slice(1))!;
		const first = Math.floor(offset / bytes);
		const last = Math.min(Math.ceil((offset + into.byteLength) / bytes), bytesOfType(type) / bytes);
		const stored = new Uint8Array((last - first) * bytes);
		this.source.readInto(name, first * bytes, stored);
		const factors = this.#factors(scale);
		const values = Float64Array.from(
			decodeFloats(type.dtype, stored),
			(value, i) => value * factors[Math.floor((first + i) / width)]!,
		);
		const skip = offset - first * bytes;
		into.set(encodeFloats(type.dtype, values).subarray(skip, skip + into.byteLength));
	}

	#factors(scale: string): ArrayLike<number> {
		let values = this.#values.get(scale);
		if (values === undefined) {
			const { dtype } = typeOf(this.source, scale);
			const read = readTensor(this.source, scale);
			values = decodeFloats(dtype, new Uint8Array(read.buffer as ArrayBuffer, read.byteOffset, read.byteLength));
			this.#values.set(scale, values);
		}
		return values;
	}

	[Symbol.dispose](): void {
		this.source[Symbol.dispose]();
	}
}
