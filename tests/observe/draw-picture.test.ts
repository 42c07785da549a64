import { expect, test } from "bun:test";
import { drawPicture } from "../../src/train/report/captions.ts";

test("a picture is drawn from its darkest value to its lightest, edges included", () => {
	// The left half is dark; 6 × 6 pixels are two lines of three characters, the second half as high.
	const lines = drawPicture(6, 6, (_, column) => (column < 2 ? -3 : 5));
	expect(lines).toEqual([" @@", " ++"]);
	expect(drawPicture(4, 2, () => 7)).toEqual([""]);
});
