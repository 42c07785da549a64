import { expect, test } from "bun:test";
import { philox4x32 } from "../../../src/models/philox.ts";
import { cropOfImage } from "../../../src/models/vit/tower.ts";
import { Distribution } from "../../../src/native/abi.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { testDevice } from "../../support.ts";

test("the words are those of the native generator", async () => {
	using device = await testDevice();
	const key = 0x0123456789abcdefn;
	using drawn = Tensor.empty(device, [1, 12]);
	device.run("philox_fill", {
		y: drawn,
		rows: 1,
		width: 12,
		first_row: 0,
		first_column: 0,
		full_width: 12,
		seed: key,
		a: 0,
		b: 1,
		distribution: Distribution.uniform,
		dtype: drawn.dtypeCode,
	});
	const expected = [0, 1, 2].flatMap((counter) => philox4x32(key, counter).map((word) => (word >>> 8) / 2 ** 24));
	expect([...drawn.toFloat32()]).toEqual(expected);
});

test("crops lie inside the table, differ by image and step, and repeat", () => {
	const crops = Array.from({ length: 200 }, (_, image) => cropOfImage(5, image));
	for (const { x, y, width, height } of crops) {
		expect(Math.min(x, y)).toBeGreaterThanOrEqual(0);
		expect(Math.max(x + width, y + height)).toBeLessThanOrEqual(1 + 1e-6);
		expect(Math.min(width, height)).toBeGreaterThanOrEqual(Math.sqrt(0.1) * 0.75 - 1e-6);
	}
	expect(new Set(crops.map(({ width }) => width)).size).toBeGreaterThan(100);
	expect(cropOfImage(5, 17)).toEqual(crops[17]!);
	expect(cropOfImage(6, 17)).not.toEqual(crops[17]!);
});
