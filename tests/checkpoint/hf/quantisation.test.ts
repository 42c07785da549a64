/** Weights in FP8 and MXFP4 are read as the bf16 that the format's definition gives and transformers makes of them. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type DtypeTag, encodeFloats } from "../../../src/checkpoint/dtype.ts";
import { HuggingFaceFolder } from "../../../src/checkpoint/hf/folder.ts";
import { Fp8Weights } from "../../../src/checkpoint/hf/fp8.ts";
import { unquantised } from "../../../src/checkpoint/hf/quantisation.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { mimo } from "../../commands/mimo.ts";
import { golden } from "../../golden.ts";
import { referencePython, runPython } from "../../reference/python.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-quantised-"));
afterAll(() => rmSync(folder, { recursive: true }));

type Stored = Record<string, readonly [DtypeTag, shape: readonly number[], bytes: Uint8Array]>;
const source = (tensors: Stored) => ({
	path: "folder",
	tensors: new Map(Object.entries(tensors).map(([name, [dtype, shape]]) => [name, { dtype, shape }])),
	readInto: (name: string, offset: number, into: Uint8Array) =>
		into.set(tensors[name]![2].subarray(offset, offset + into.byteLength)),
});

/** Two matrices of 5 × 130 whose last blocks are cut, with every code. */
const [rows, columns] = [5, 130];
const codes = Uint8Array.from({ length: 2 * rows * columns }, (_, i) => (i * 37) % 256);
const scales = Float32Array.from({ length: 2 * 3 * 2 }, (_, i) => 1.1 ** i / 3);
const shape = [2, rows, columns];
const stored: Stored = {
	w: ["F8_E4M3", shape, codes],
	w_scale_inv: ["F32", [2, 3, 2], encodeFloats("F32", scales)],
	other: ["BF16", [2], Uint8Array.of(1, 2, 3, 4)],
};

test("values are sign, exponent and mantissa times the scale of their block, rounded to fp32 and to bf16", () => {
	const store = new Fp8Weights(source(stored), [2, 128]);
	expect([...store.tensors]).toEqual([
		["w", { dtype: "BF16", shape }],
		["other", { dtype: "BF16", shape: [2] }],
	]);
	const expected = Float32Array.from(codes, (code, at) => {
		const [row, column] = [Math.floor(at / columns), at % columns];
		const block = (Math.floor(row / rows) * 3 + Math.floor((row % rows) / 2)) * 2 + Math.floor(column / 128);
		if ((code & 127) === 127) return Number.NaN;
		const [power, mantissa] = [Math.floor((code % 128) / 8), (code % 8) / 8];
		const magnitude = power === 0 ? mantissa * 2 ** -6 : (1 + mantissa) * 2 ** (power - 7);
		return (code < 128 ? 1 : -1) * magnitude * scales[block]!;
	});
	const whole = new Uint8Array(2 * codes.length);
	store.readInto("w", 0, whole);
	// NaN has many spellings.
	const bits = (bytes: Uint8Array<ArrayBufferLike>) =>
		[...new Uint16Array(bytes.buffer)].map((value) => ((value & 0x7fff) > 0x7f80 ? -1 : value));
	expect(bits(whole)).toEqual(bits(encodeFloats("BF16", expected)));
	const pieces = new Uint8Array(whole.length);
	for (let at = 0; at < pieces.length; at += 77) store.readInto("w", at, pieces.subarray(at, at + 77));
	expect(pieces).toEqual(whole);
	const other = new Uint8Array(2);
	store.readInto("other", 1, other);
	expect([...other]).toEqual([2, 3]);
});

test("one scale may stand for a matrix", () => {
	const single: Stored = {
		w: ["F8_E4M3", [1, 2], Uint8Array.of(0x38, 0xb8)],
		w_scale_inv: ["BF16", [], Uint8Array.of(0, 0x40)],
	};
	const read = new Uint8Array(4);
	new Fp8Weights(source(single), null).readInto("w", 0, read);
	expect([...read]).toEqual([...encodeFloats("BF16", Float32Array.of(2, -2))]);
});

test("scales of another shape are refused by name", () => {
	expect(() => new Fp8Weights(source(stored), [128, 128])).toThrow(
		"folder: w [2,5,130] F8_E4M3 with w_scale_inv [2,3,2] F32 has no scale for each block of 128 × 128.",
	);
});

test("config.json is that of bf16 weights, and any other stays as it is", () => {
	const configOf = (quantised: unknown) =>
		`{"rms_norm_eps": 1e-05, "rope_theta": 150000.0, "quantization_config": ${JSON.stringify(quantised)}}`;
	for (const quantised of [{ quant_method: "mxfp4" }, { quant_method: "fp8", weight_block_size: [128, 128] }]) {
		expect(unquantised(configOf(quantised), "config.json")).toMatchObject({
			configText: '{\n  "rms_norm_eps": 0.00001,\n  "rope_theta": 150000.0\n}\n',
			notice: `config.json: weights in ${quantised.quant_method.toUpperCase()} are read as bf16, and written so, without quantization_config.`,
		});
	}
	for (const other of ['{"a": 1}', configOf(null)]) {
		expect(unquantised(other, "config.json")).toEqual({ configText: other, decode: null, notice: null });
	}
	for (const [quantised, sentence] of [
		[{ quant_method: "awq", bits: 4 }, 'quant_method is "awq"; weights in "fp8" and "mxfp4" can be read'],
		[{}, "quant_method is undefined"],
		[{ quant_method: "fp8", fmt: "e5m2" }, 'fmt is "e5m2"'],
		[{ quant_method: "fp8", weight_block_size: [128, 0] }, "weight_block_size is [128,0]"],
	] as const) {
		for (const [config, where] of [
			[configOf(quantised), "a model without model_type: quantization_config"],
			[nested(quantised), "qwen3_moe: text_config.quantization_config"],
		] as const) {
			expect(() => unquantised(config, "config.json")).toThrow(`config.json: ${where}.${sentence}`);
		}
	}
});

const nested = (quantised: unknown, more = "") =>
	`{"model_type": "qwen3_vl_moe", ${more}"text_config": {"model_type": "qwen3_moe", "quantization_config": ${JSON.stringify(quantised)}, "rope_theta": 1.0}, "vision_config": {}}`;

test("the quantisation may be that of the language model of a whole model, and the whole model's comes first", () => {
	const config = {
		model_type: "qwen3_vl_moe",
		text_config: { model_type: "qwen3_moe", rope_theta: 1 },
		vision_config: {},
	};
	for (const more of ["", '"quantization_config": {"quant_method": "fp8"}, ']) {
		const { configText, decode, notice } = unquantised(
			nested({ quant_method: more === "" ? "fp8" : "awq", weight_block_size: [2, 128] }, more),
			"config.json",
		);
		expect(JSON.parse(configText)).toEqual(config);
		expect(configText).toContain('"rope_theta": 1.0');
		expect(notice).toContain("weights in FP8 are read as bf16");
		if (more === "") expect(decode!(source(stored)).tensors.get("w")).toEqual({ dtype: "BF16", shape });
	}
	const none = nested(null);
	expect(unquantised(none, "config.json")).toEqual({ configText: none, decode: null, notice: null });
});

const python = referencePython("torch", "transformers", "accelerate");
test.skipIf(python === null)(
	"a folder becomes what transformers makes of it, bit for bit",
	async () => {
		const bases = {
			qwen3: "qwen3",
			"qwen3-moe-bf16": "qwen3-moe",
			"deepseek-v3": "deepseek-v3-noq",
			"gpt-oss": "gpt-oss",
		};
		const script = join(import.meta.dir, "../../reference/quantised.py");
		await runPython(python!, [
			"-W",
			"ignore",
			script,
			folder,
			...Object.entries(bases).map(([name, base]) => `${name}=${golden(base)}`),
		]);
		for (const name of Object.keys(bases)) {
			const outcome = mimo(["convert-ckpt", "--to", "hf", name, `${name}-own`], folder);
			expect([name, outcome.exitCode, outcome.stderr + outcome.stdout]).toEqual([
				...[name, 0, expect.stringContaining("are read as bf16, and written so, without quantization_config.")],
			]);
			using own = HuggingFaceFolder.open(join(folder, `${name}-own`));
			using plain = HuggingFaceFolder.open(join(folder, `${name}-plain`));
			expect(own.configText).not.toContain("quantization_config");
			expect([...own.tensors.keys()].sort()).toEqual([...plain.tensors.keys()].sort());
			for (const tensor of own.tensors.keys()) {
				expect([tensor, Bun.deepEquals(readTensor(own, tensor), readTensor(plain, tensor))]).toEqual([tensor, true]);
			}
		}
	},
	600_000,
);
