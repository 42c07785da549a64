/**
 * Stacks of experts in MXFP4, as gpt-oss is published, read as the bf16 stacks that transformers makes of them. `NAME_blocks` [E, out,
 * in / 32, 16] u8 has two values a byte, the earlier in its lower half: a sign bit over an index of magnitudes; `NAME_scales` [E, out,
 * in / 32] u8 their exponents above −127 (OCP Microscaling Formats 1.0, section 5.3). NAME is [E, in, out].
 */
import { UserError } from "../../system/errors.ts";
import type { TensorStore, TensorType } from "../store.ts";

const magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6];
const valuesOfBlock = 32;

/** Upper halves of fp32 values, which have no lower ones, by exponent · 16 + code. */
const bf16Bits = (() => {
	const values = Float32Array.from({ length: 256 * 16 }, (_, at) => {
		const sign = (at & 8) === 0 ? 1 : -1;
		return sign * magnitudes[at & 7]! * 2 ** ((at >> 4) - 127);
	});
	return Uint16Array.from(new Uint32Array(values.buffer), (bits) => bits >>> 16);
})();

/** A store of MXFP4 stacks as bf16. The source is the caller's. */
export class Mxfp4Stacks implements Pick<TensorStore, "readInto"> {
	readonly tensors: ReadonlyMap<string, TensorType>;
	#latest: { readonly name: string; readonly expert: number; readonly bytes: Uint8Array } | null = null;

	constructor(private readonly source: Pick<TensorStore, "path" | "tensors" | "readInto">) {
		const tensors = new Map(source.tensors);
		for (const [blocksName, blocks] of source.tensors) {
			const name = /^(.*)_blocks$/.exec(blocksName)?.[1];
			const scales = name === undefined ? undefined : source.tensors.get(`${name}_scales`);
			if (name === undefined || scales === undefined) continue;
			const [experts = 0, outputs = 0, groups = 0, bytes] = blocks.shape;
			const fits = blocks.shape.length === 4 && bytes === valuesOfBlock / 2 && blocks.dtype === "U8";
			if (!fits || scales.dtype !== "U8" || scales.shape.join() !== blocks.shape.slice(0, 3).join()) {
				throw new UserError(
					`${source.path}: ${blocksName} [${blocks.shape}] ${blocks.dtype} with ${name}_scales [${scales.shape}] ${scales.dtype} is no stack in MXFP4.`,
				);
			}
			tensors.delete(blocksName);
			tensors.delete(`${name}_scales`);
			tensors.set(name, { dtype: "BF16", shape: [experts, groups * valuesOfBlock, outputs] });
		}
		this.tensors = tensors;
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		if (this.source.tensors.has(name)) {
			this.source.readInto(name, offset, into);
			return;
		}
		const [, inputs, outputs] = this.tensors.get(name)!.shape as [number, number, number];
		const size = inputs * outputs * 2;
		for (let at = offset; at < offset + into.byteLength; ) {
			const expert = Math.floor(at / size);
			const end = Math.min(offset + into.byteLength, (expert + 1) * size);
			into.set(this.#expert(name, expert).subarray(at - expert * size, end - expert * size), at - offset);
			at = end;
		}
	}

	/** A stack's matrix [in, out] of one expert. A reader asks for pieces of it, so the latest is kept. */
	#expert(name: string, expert: number): Uint8Array {
		if (this.#latest?.name === name && this.#latest.expert === expert) return this.#latest.bytes;
		const [, inputs, outputs] = this.tensors.get(name)!.shape as [number, number, number];
		const groups = inputs / valuesOfBlock;
		const scales = new Uint8Array(outputs * groups);
		this.source.readInto(`${name}_scales`, expert * scales.length, scales);
		const blocks = new Uint8Array((outputs * inputs) / 2);
		this.source.readInto(`${name}_blocks`, expert * blocks.length, blocks);
		const values = new Uint16Array(inputs * outputs);
		for (let output = 0; output < outputs; output++) {
			for (let group = 0; group < groups; group++) {
				const row = output * groups + group;
				const exponent = scales[row]! << 4;
				let to = group * valuesOfBlock * outputs + output;
				for (let byte = row * 16; byte < row * 16 + 16; byte++) {
					const pair = blocks[byte]!;
					values[to] = bf16Bits[exponent | (pair & 15)]!;
					values[to + outputs] = bf16Bits[exponent | (pair >> 4)]!;
					to += 2 * outputs;
				}
			}
		}
		this.#latest = { name, expert, bytes: new Uint8Array(values.buffer) };
		return this.#latest.bytes;
	}
}
