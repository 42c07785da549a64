/** Norms that a step reports of the encoder's gradient where some of its ranks saw no image (docs/spec/runtime.md §3.7). */
import { expect, test } from "bun:test";
import { withNorms } from "../../src/train/participation.ts";

test("the norm under the other policy has the encoder's part at its other size", () => {
	// Squares of the encoder's exact gradient are 9 of 25. One of three ranks saw images: its gradient becomes three times as large.
	const participated = { participants: 1, ranks: 3, squares: 9, changed: false };
	const corrected = Math.sqrt(16 + 9 * 9);
	const exact = withNorms({ ...participated, policy: "exact" }, 5);
	expect(exact).toEqual({ participants: 1, ranks: 3, exactNorm: 5, correctedNorm: corrected });
	const other = withNorms({ ...participated, policy: "corrected" }, corrected);
	expect(other.correctedNorm).toBe(corrected);
	expect(other.exactNorm).toBeCloseTo(5, 12);
});

test("both norms are the same where all ranks or none saw images", () => {
	for (const participants of [0, 3]) {
		for (const policy of ["exact", "corrected"] as const) {
			const norms = withNorms({ policy, participants, ranks: 3, squares: 9, changed: false }, 5);
			expect(norms).toMatchObject({ exactNorm: 5, correctedNorm: 5 });
		}
	}
});
