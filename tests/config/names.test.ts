import { expect, test } from "bun:test";
import { camelCase, editDistance, nearestHint, nearestName } from "../../src/config/names.ts";

test("edit distance counts insertions, deletions, substitutions and swaps of neighbours", () => {
	for (const [a, b, distance] of [
		["", "abc", 3],
		["abc", "abc", 0],
		["kitten", "sitting", 3],
		["ab", "ba", 1],
		["hiden-size", "hidden-size", 1],
	] as const) {
		expect([a, b, editDistance(a, b)]).toEqual([a, b, distance]);
	}
});

test("the nearest name", () => {
	expect(nearestName("trian", ["parity", "train", "doctor"])).toBe("train");
	expect(nearestHint("jsno", ["json", "help"], "--")).toBe("; the nearest is --json");
});

test("a name that is another altogether has none", () => {
	expect(nearestName("fp8-format", ["ocr-prompt", "log-format-x"])).toBeNull();
	expect(nearestName("learning-rate", ["rerun-mode", "lr"])).toBeNull();
	expect(nearestHint("learning-rate", ["rerun-mode"])).toBe("");
});

test("camel case keeps digits", () => {
	expect(camelCase("adam-beta1")).toBe("adamBeta1");
	expect(camelCase("img-h")).toBe("imgH");
});
