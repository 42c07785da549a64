/** One bit of one value: every reader of a native checkpoint refuses it and names the file and the tensor. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openSource, openWeights, planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { damages, formatInspection, inspectCheckpoint } from "../../../src/checkpoint/conversion/inspect.ts";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { openSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readPieces, readTensor, type TensorStore } from "../../../src/checkpoint/store.ts";
import { mimo } from "../../commands/mimo.ts";
import { generator } from "../../damage.ts";
import { golden } from "../../golden.ts";
import { conversionOptions } from "../conversion/options.ts";

const tiny = golden("hybrid-tiny");

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-damage-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const dataFile = "release/data/r00000-000.safetensors";

/** A copy of the whole checkpoint with one bit of a value flipped; the name of its tensor. */
function flipped(whole: string, seed: number): { readonly path: string; readonly name: string } {
	const path = join(folder, `flipped-${seed}`);
	cpSync(whole, path, { recursive: true });
	const file = join(path, dataFile);
	const random = generator(seed);
	using opened = openSafetensors(file);
	const tensors = [...opened.tensors];
	const [chunk, { position, bytes }] = tensors[random(tensors.length)]!;
	const data = readFileSync(file);
	data[position + random(bytes)]! ^= 1 << random(8);
	writeFileSync(file, data);
	return { path, name: chunk.replace(/@.*$/, "") };
}

function readAll(store: TensorStore): void {
	for (const name of store.tensors.keys()) for (const _ of readPieces(store, name));
}

describe.skipIf(!tiny)("one flipped bit", () => {
	let whole: string;
	beforeAll(async () => {
		whole = join(folder, "whole");
		using planned = planConversion(conversionOptions({ from: "hf", to: "native", source: tiny!, target: whole }));
		await planned.run(() => {});
	});

	test("conversion, inspect, weights of a parity and load: 16 of 16", async () => {
		for (let seed = 1; seed <= 16; seed++) {
			const { path, name } = flipped(whole, seed);
			const sentence = `${join(path, dataFile)} is damaged: the checksum of tensor ${name} differs.`;
			for (const to of ["hf", "torch_dist", "native"] as const) {
				const target = join(folder, `target-${seed}-${to}`);
				using planned = planConversion(conversionOptions({ from: "native", to, source: path, target }));
				await expect(planned.run(() => {})).rejects.toThrow(sentence);
			}
			const inspection = inspectCheckpoint(path, { checksums: true, allowFallback: false });
			expect(damages(inspection)).toEqual([sentence]);
			expect(formatInspection(inspection).filter((line) => line.includes("DAMAGED"))).toHaveLength(1);
			using weights = openWeights(path);
			expect(() => readAll(weights)).toThrow(sentence);
			using loaded = NativeCheckpoint.openExactly(path);
			expect(() => loaded.verify()).toThrow(sentence);
			rmSync(path, { recursive: true });
		}
	}, 60_000);

	test("commands end with one sentence", () => {
		const { path, name } = flipped(whole, 1);
		const commands = [
			["convert-ckpt", "--to", "hf", "--verify", path, "hf"],
			["convert-ckpt", "inspect", path],
			["parity", "--golden", tiny!, "--weights", path],
		];
		for (const command of commands) {
			const { exitCode, stderr } = mimo(command, folder);
			expect(stderr).toBe(`mimo: ${join(path, dataFile)} is damaged: the checksum of tensor ${name} differs.\n`);
			expect(exitCode).toBe(1);
		}
	});

	test("a part of a tensor is not given out before the whole chunk is checked", () => {
		using source = openSource(
			whole,
			"native",
			conversionOptions({ from: "native", to: "hf", source: whole, target: "" }),
		);
		const name = "language_model.embedding.word_embeddings.weight";
		const expected = readTensor(source.weights, name) as Float32Array;
		const path = join(folder, "part");
		cpSync(whole, path, { recursive: true });
		const file = join(path, dataFile);
		using opened = openSafetensors(file);
		const [, { position, bytes }] = [...opened.tensors].find(([chunk]) => chunk.startsWith(name))!;
		using untouched = NativeCheckpoint.open(path);
		const part = new Uint8Array(8);
		untouched.readInto(name, 16, part);
		expect(new Float32Array(part.buffer)).toEqual(expected.slice(4, 6));
		const data = readFileSync(file);
		data[position + bytes - 1]! ^= 1;
		writeFileSync(file, data);
		using checkpoint = NativeCheckpoint.open(path);
		expect(() => checkpoint.readInto(name, 16, new Uint8Array(8))).toThrow(`the checksum of tensor ${name} differs`);
	});
});
