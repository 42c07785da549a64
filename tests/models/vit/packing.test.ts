/** Boundaries, class tokens and pixel shuffle of packed images (docs/spec/vision.md §G4 and §G5). */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { checkVitConfig, type VitConfig } from "../../../src/models/vit/config.ts";
import { PackedImages } from "../../../src/models/vit/packing.ts";
import type { Device } from "../../../src/native/device.ts";
import { testDevice } from "../../support.ts";
import { tinyTower } from "./tower.ts";

const whole = { embeds: true, hasHead: true };
let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** Rows of the stream that become output rows, without those of class tokens. */
function order(config: VitConfig, rows: number, columns: number): number[] {
	using packed = new PackedImages(device, config, [{ rows, columns }], null, whole);
	return [...packed.output!.host.column].map((row) => row - config.classTokens);
}

test("pixel shuffle joins 2 × 2 blocks, row by row", () => {
	expect(order(tinyTower, 4, 6)).toEqual(
		[
			[0, 1, 6, 7],
			[2, 3, 8, 9],
			[4, 5, 10, 11],
			[12, 13, 18, 19],
			[14, 15, 20, 21],
			[16, 17, 22, 23],
		].flat(),
	);
	expect(order(tinyTower, 4, 4)).toEqual([0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
});

test("boundaries count the class tokens of every image", () => {
	const grids = [
		{ rows: 2, columns: 4 },
		{ rows: 4, columns: 6 },
		{ rows: 2, columns: 2 },
	];
	using eight = new PackedImages(device, { ...tinyTower, classTokens: 8 }, grids, null, whole);
	expect([...eight.sequences.cuSeqlens.toInt32()]).toEqual([0, 16, 48, 60]);
	expect(eight.sequences.maxSeqlen).toBe(32);
	expect(eight.rowsPerImage).toEqual([2, 6, 1]);
	expect(eight.rows).toBe(9);
	using ten = new PackedImages(device, { ...tinyTower, classTokens: 10 }, grids, null, whole);
	expect([...ten.sequences.cuSeqlens.toInt32()]).toEqual([0, 18, 52, 66]);
	using kept = new PackedImages(
		device,
		{ ...tinyTower, classTokens: 8, pixelShuffle: false, dropClassTokens: false },
		grids,
		null,
		whole,
	);
	expect(kept.rowsPerImage).toEqual([16, 32, 12]);
	expect(kept.output).toBeNull();
});

test("what pixel shuffle cannot join is refused by name", () => {
	const pack = (rows: number, columns: number) => new PackedImages(device, tinyTower, [{ rows, columns }], null, whole);
	expect(() => pack(3, 4)).toThrow("Image 0 has 3 × 4 patches; pixel shuffle needs an even number");
	expect(() => pack(0, 4)).toThrow("Image 0 has 0 × 4 patches; both must be whole and positive.");
	expect(() => checkVitConfig({ ...tinyTower, dropClassTokens: false })).toThrow("--disable-vision-class-token");
});
