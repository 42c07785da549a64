/** Stacks in MXFP4 are read as the bf16 that the format's definition gives, transposed, in pieces of any size. */
import { expect, test } from "bun:test";
import type { DtypeTag } from "../../../src/checkpoint/dtype.ts";
import { decodeFloats } from "../../../src/checkpoint/dtype.ts";
import { Mxfp4Stacks } from "../../../src/checkpoint/hf/mxfp4.ts";

const [experts, outputs, inputs] = [3, 5, 64];
/** Every code and exponent occurs. */
const bytesOf = (count: number, step: number) => Uint8Array.from({ length: count }, (_, i) => (i * step + 11) % 255);
const stored = {
	"x.up_blocks": { shape: [experts, outputs, inputs / 32, 16], bytes: bytesOf((experts * outputs * inputs) / 2, 37) },
	"x.up_scales": { shape: [experts, outputs, inputs / 32], bytes: bytesOf((experts * outputs * inputs) / 32, 101) },
	"x.up_bias": { shape: [experts, outputs], bytes: bytesOf(experts * outputs, 1) },
};
type Stored = Record<string, { readonly shape: number[]; readonly bytes: Uint8Array; readonly dtype?: DtypeTag }>;
const source = (tensors: Stored) => ({
	path: "folder",
	tensors: new Map(Object.entries(tensors).map(([name, { shape, dtype = "U8" }]) => [name, { dtype, shape }])),
	readInto: (name: string, offset: number, into: Uint8Array) =>
		into.set(tensors[name]!.bytes.subarray(offset, offset + into.byteLength)),
});

test("values are sign, magnitude and exponent, rows of the input first", () => {
	const stacks = new Mxfp4Stacks(source(stored));
	expect([...stacks.tensors.keys()].sort()).toEqual(["x.up", "x.up_bias"]);
	expect(stacks.tensors.get("x.up")).toEqual({ dtype: "BF16", shape: [experts, inputs, outputs] });
	const expected = new Float32Array(experts * inputs * outputs);
	for (let e = 0; e < experts; e++) {
		for (let o = 0; o < outputs; o++) {
			for (let i = 0; i < inputs; i++) {
				const at = (e * outputs + o) * inputs + i;
				const byte = stored["x.up_blocks"].bytes[Math.floor(at / 2)]!;
				const code = at % 2 === 0 ? byte % 16 : Math.floor(byte / 16);
				// One sign bit, two of the exponent with bias 1, one of the mantissa: 0 and 0.5 below 1.
				const [power, half] = [Math.floor(code / 2) % 4, code % 2];
				const magnitude = power === 0 ? half / 2 : (1 + half / 2) * 2 ** (power - 1);
				const exponent = stored["x.up_scales"].bytes[Math.floor(at / 32)]! - 127;
				expected[(e * inputs + i) * outputs + o] = (code < 8 ? 1 : -1) * magnitude * 2 ** exponent;
			}
		}
	}
	const whole = new Uint8Array(expected.length * 2);
	stacks.readInto("x.up", 0, whole);
	expect(decodeFloats("BF16", whole)).toEqual(expected);
	const pieces = new Uint8Array(whole.length);
	for (let at = 0; at < pieces.length; at += 77) stacks.readInto("x.up", at, pieces.subarray(at, at + 77));
	expect(pieces).toEqual(whole);
	const bias = new Uint8Array(4);
	stacks.readInto("x.up_bias", 3, bias);
	expect(bias).toEqual(stored["x.up_bias"].bytes.subarray(3, 7));
});

test("blocks without scales of their shape are refused by name", () => {
	const scales = { shape: [experts, outputs, 1], bytes: new Uint8Array(15) };
	expect(() => new Mxfp4Stacks(source({ ...stored, "x.up_scales": scales }))).toThrow(
		"folder: x.up_blocks [3,5,2,16] U8 with x.up_scales [3,5,1] U8 is no stack in MXFP4.",
	);
});
