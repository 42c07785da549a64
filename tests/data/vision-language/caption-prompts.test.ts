import { expect, test } from "bun:test";
import { captionPrompts } from "../../../src/data/vision-language/prompt.ts";

test("a sequence is divided into a prompt and the reference caption", () => {
	// Two sequences: image tokens 9, a line feed, then a caption that ends with 0; and one that is cut off.
	const ids = Int32Array.of(9, 9, 1, 5, 6, /**/ 9, 1, 7, 8);
	const labels = Int32Array.of(-100, -100, 5, 6, 0, /**/ -100, 7, 8, -100);
	const lossMask = Float32Array.from(labels, (label) => (label === -100 ? 0 : 1));
	const positions = Int32Array.from({ length: 3 * 9 }, (_, at) => 100 * Math.floor(at / 9) + (at % 9));
	const { prompts, truths } = captionPrompts({ ids, labels, lossMask, lengths: [5, 4], positions }, 0);
	expect(truths).toEqual([
		[5, 6],
		[7, 8],
	]);
	expect([...prompts.ids]).toEqual([9, 9, 1, 9, 1]);
	expect(prompts.lengths).toEqual([3, 2]);
	expect([...prompts.positions!]).toEqual([0, 100, 200].flatMap((axis) => [0, 1, 2, 5, 6].map((at) => axis + at)));
	expect([...new Set(prompts.labels)]).toEqual([-100]);
	expect(prompts.lossMask).toEqual(new Float32Array(5));
});
