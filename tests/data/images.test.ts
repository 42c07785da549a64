import { expect, test } from "bun:test";
import { patchify } from "../../src/data/images.ts";

test("patches row by row, values channel by channel (docs/spec/vision.md §G3)", () => {
	const pixels = Float32Array.from({ length: 3 * 4 * 6 }, (_, i) => {
		const [channel, y, x] = [Math.floor(i / 24), Math.floor(i / 6) % 4, i % 6];
		return 100 * channel + 10 * y + x;
	});
	const patches = patchify(pixels, 4, 6, 2);
	const patch = (index: number) => [...patches.subarray(index * 12, index * 12 + 12)];
	expect(patch(0)).toEqual([0, 1, 10, 11, 100, 101, 110, 111, 200, 201, 210, 211]);
	expect(patch(1)).toEqual([2, 3, 12, 13, 102, 103, 112, 113, 202, 203, 212, 213]);
	expect(patch(4)).toEqual([22, 23, 32, 33, 122, 123, 132, 133, 222, 223, 232, 233]);
	expect(patches.length).toBe(72);
	expect(() => patchify(pixels, 4, 6, 4)).toThrow("72 values are not an image of 4 × 6 in patches of 4.");
});
