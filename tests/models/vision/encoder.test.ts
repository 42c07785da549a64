/** Tower and projector as one module (docs/spec/vision.md §G18). */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { MergedStore } from "../../../src/checkpoint/lora/adapters.ts";
import { loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { isAdapterName } from "../../../src/models/lora.ts";
import type { PatchGrid } from "../../../src/models/tower.ts";
import { type EncoderConfig, EncoderModule } from "../../../src/models/vision/encoder.ts";
import { visionEncoder } from "../../../src/models/vit/tower.ts";
import type { Device } from "../../../src/native/device.ts";
import { Tape, type WeightGradients } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { randomValues, relativeRms, testDevice } from "../../support.ts";
import { normedTower, tinyProjector, tinyTower } from "../vit/tower.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const width = 10;
const config: EncoderConfig = {
	tower: tinyTower,
	projector: tinyProjector(width),
};
const [small, wide]: PatchGrid[] = [
	{ rows: 4, columns: 4 },
	{ rows: 2, columns: 6 },
];

function open(change: Partial<EncoderConfig> = {}, frozenTower = false): EncoderModule {
	const encoder = new EncoderModule(device, visionEncoder({ ...config, ...change }), {
		frozenTower,
		frozenProjector: false,
	});
	encoder.initialise(7);
	return encoder;
}

function pixels({ rows, columns }: PatchGrid, seed: number): Float32Array {
	return randomValues(rows * columns * 12, seed);
}

/** Rows of the images, forward only unless a tape is given. */
function encode(
	encoder: EncoderModule,
	images: readonly (readonly [PatchGrid, Float32Array])[],
	options: { tape?: Tape; cropKey?: number; firstImage?: number } = {},
): { rows: Tensor; rowsPerImage: readonly number[] } {
	const values = Float32Array.from(images.flatMap(([, patches]) => [...patches]));
	using patches = Tensor.from(device, values, [values.length / 12, 12]);
	const { tape = new Tape(device, { recording: false }), cropKey = 0, firstImage = 0 } = options;
	const grids = images.map(([grid]) => grid);
	const indices = grids.map((_, index) => firstImage + index);
	const rows = encoder.forward(tape, { patches, grids, cropKey, indices });
	return { rows, rowsPerImage: grids.map((grid) => encoder.config.tower.rowsOf(grid)) };
}

function rowsOf(...args: Parameters<typeof encode>): Float32Array {
	using rows = encode(...args).rows;
	return rows.toFloat32();
}

describe("packed images", () => {
	const [a, b] = [pixels(small!, 1), pixels(wide!, 2)];

	test("an image gives the same rows alone, beside another, and after it", () => {
		using encoder = open();
		const [alone, other] = [rowsOf(encoder, [[small!, a]]), rowsOf(encoder, [[wide!, b]])];
		expect(alone.length).toBe(4 * width);
		expect(other.length).toBe(3 * width);
		const together = rowsOf(encoder, [
			[small!, a],
			[wide!, b],
			[small!, a],
		]);
		const swapped = rowsOf(encoder, [
			[wide!, b],
			[small!, a],
		]);
		expect(relativeRms(together, [...alone, ...other, ...alone])).toBeLessThan(1e-6);
		expect(relativeRms(swapped, [...other, ...alone])).toBeLessThan(1e-6);
	});

	test("no images give no rows", () => {
		using encoder = open();
		const { rows, rowsPerImage } = encode(encoder, []);
		using none = rows;
		expect(none.shape).toEqual([0, width]);
		expect(none.gradient).toBeNull();
		expect(rowsPerImage).toEqual([]);
	});

	test("random crops follow the image's index in the global batch, not its place here", () => {
		const positions = { mode: "cpe", aspectRatioSelect: false, randomCrop: true } as const;
		const tower = { ...tinyTower, positions };
		using encoder = open({ tower });
		const train = (images: readonly (readonly [PatchGrid, Float32Array])[], firstImage: number, cropKey = 3) => {
			const tape = new Tape(device, { recording: true });
			const rows = rowsOf(encoder, images, { tape, cropKey, firstImage });
			tape.discard();
			return rows;
		};
		const both = train(
			[
				[small!, a],
				[wide!, b],
			],
			4,
		);
		expect(relativeRms(both.subarray(4 * width), train([[wide!, b]], 5))).toBeLessThan(1e-6);
		expect(relativeRms(train([[wide!, b]], 5), train([[wide!, b]], 6))).toBeGreaterThan(1e-3);
		expect(relativeRms(train([[wide!, b]], 5), train([[wide!, b]], 5, 4))).toBeGreaterThan(1e-3);
		// Evaluated, and frozen, the whole table counts.
		using frozen = open({ tower }, true);
		using plain = open();
		const tape = new Tape(device, { recording: true });
		expect(rowsOf(frozen, [[small!, a]], { tape })).toEqual(rowsOf(plain, [[small!, a]]));
		tape.discard();
	});
});

test("a frozen tower has no gradients, the projector does", () => {
	using encoder = open({}, true);
	const tape = new Tape(device, { recording: true });
	using rows = encode(encoder, [[small!, pixels(small!, 1)]], { tape }).rows;
	rows.gradient!.accumulate(Tensor.from(device, randomValues(rows.elements, 3), rows.shape));
	tape.backward();
	for (const { name, mainGradient } of encoder.parameters) {
		if (name.includes("radio_model")) expect(mainGradient).toBeNull();
		else expect(mainGradient!.toFloat32().some((value) => value !== 0)).toBe(true);
	}
});

test("gradients are those of differences, in every parameter of tower and projector", () => {
	for (const tower of [tinyTower, normedTower]) {
		using encoder = open({ tower: { ...tower, layers: 1 } });
		expectGradients(encoder);
	}
});

/** Compares the gradients of all trainable parameters, of a weighted sum of the rows, with central differences. */
function expectGradients(encoder: EncoderModule): void {
	const images = [
		[wide!, pixels(wide!, 4)],
		[small!, pixels(small!, 5)],
	] as const;
	const weights = randomValues(7 * width, 6);
	const tape = new Tape(device, { recording: true });
	{
		using rows = encode(encoder, images, { tape }).rows;
		rows.gradient!.accumulate(Tensor.from(device, weights, rows.shape));
	}
	tape.backward();
	const loss = () => rowsOf(encoder, images).reduce((sum, value, i) => sum + value * weights[i]!, 0);
	for (const { name, value, mainGradient } of encoder.parameters) {
		if (mainGradient === null) continue;
		const gradient = mainGradient.toFloat32();
		const original = value.toFloat32();
		const direction = randomValues(original.length, name.length);
		const shifted = (step: number) => {
			device.copyToDevice(
				value,
				Float32Array.from(original, (w, i) => w + step * direction[i]!),
			);
			const result = loss();
			device.copyToDevice(value, original);
			return result;
		};
		const numeric = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
		const exact = gradient.reduce((sum, g, i) => sum + g * direction[i]!, 0);
		const size = Math.sqrt(gradient.reduce((sum, g) => sum + g * g, 0) * direction.reduce((sum, d) => sum + d * d, 0));
		expect(Math.abs(numeric - exact) / size, name).toBeLessThan(5e-3);
	}
}

test("late weight gradients are the immediate ones, bit for bit, whatever forward has let go of", () => {
	const images = [
		[wide!, pixels(wide!, 4)],
		[small!, pixels(small!, 5)],
	] as const;
	const gradients = (weightGradients: WeightGradients) => {
		using encoder = open();
		const tape = new Tape(device, { recording: true });
		{
			using rows = encode(encoder, images, { tape }).rows;
			rows.gradient!.accumulate(Tensor.from(device, randomValues(7 * width, 6), rows.shape));
		}
		tape.backward(weightGradients);
		const left = tape.segments.flatMap(({ tasks }) => tasks).length;
		tape.drain();
		return { left, bits: [...encoder.parameters].map((p) => new Uint32Array(p.mainGradient!.toFloat32().buffer)) };
	};
	const [immediate, late] = [gradients("immediate"), gradients("late")];
	expect([immediate.left, late.left > 10]).toEqual([0, true]);
	expect(late.bits).toEqual(immediate.bits);
});

describe("adapters", () => {
	const lora = { rank: 3, alpha: 6, dropout: 0, start: "drawn" } as const;
	const adapted = (targets: readonly string[], activation: "geluTanh" | "geluErf" = "geluTanh"): EncoderConfig => ({
		tower: { ...tinyTower, activation, lora: { ...lora, targets } },
		projector: { ...tinyProjector(width), lora: { ...lora, targets: ["linear_fc1", "linear_fc2"] } },
	});
	const every = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"];
	const images = [
		[small!, pixels(small!, 1)],
		[wide!, pixels(wide!, 2)],
	] as const;

	// One of the two GELU projections with an adapter is enough to part both products from their GELU.
	test.each([
		["geluTanh", every],
		["geluErf", every],
		["geluTanh", ["linear_fc1"]],
		["geluTanh", ["linear_fc2"]],
		["geluTanh", ["linear_qkv"]],
	] as const)("with %s on %p give the rows of the merged weights", (activation, targets) => {
		const config = adapted(targets, activation);
		using encoder = open(config);
		const rows = rowsOf(encoder, images);
		using merged = open({
			tower: { ...config.tower, lora: null },
			projector: { ...config.projector, lora: null },
		});
		const without = rowsOf(merged, images);
		using weights = new MergedStore(new ValueStore("adapted", encoder), lora.alpha / lora.rank);
		loadModel(merged, weights);
		expect(relativeRms(rowsOf(merged, images), rows)).toBeLessThan(2e-6);
		expect(relativeRms(without, rows)).toBeGreaterThan(1e-2);
	});

	test("alone have gradients, and those of finite differences", () => {
		const config = adapted(every);
		using encoder = open(config);
		const names = [...encoder.parameters].filter(({ trainable }) => trainable).map(({ name }) => name);
		expect(names).toHaveLength(2 * (2 * every.length + 2));
		expect(names.every(isAdapterName)).toBeTrue();
		expectGradients(encoder);
	});
});
