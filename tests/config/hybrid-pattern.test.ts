import { expect, test } from "bun:test";
import { countLayers, PatternError, parseHybridPattern, parseSegments } from "../../src/config/hybrid-pattern.ts";
import { pipelineObjection, segmentLengths } from "../../src/config/pipeline.ts";

test("one symbol is one layer", () => {
	const layers = parseHybridPattern("ME*-M");
	expect(layers).toEqual(["M", "E", "*", "-", "M"]);
	expect(countLayers(layers, "M")).toBe(2);
	expect(countLayers(layers, "-")).toBe(1);
});

function refusal(pattern: string): PatternError {
	try {
		parseHybridPattern(pattern);
	} catch (error) {
		if (error instanceof PatternError) return error;
	}
	throw new Error(`${pattern} was accepted.`);
}

test("what is not built is refused by name, at its position", () => {
	for (const [pattern, position, name] of [
		["ME/*E", 3, "multi-token prediction depths (/)"],
		["[M*]", 1, "layer groups ([ and ])"],
		["M]", 2, "layer groups ([ and ])"],
		["MG", 2, "Gated DeltaNet layers (G)"],
		["MMD", 3, "DeepSeek sparse attention layers (D)"],
		["+", 1, "multi-latent attention layers (+)"],
	] as const) {
		const error = refusal(pattern);
		expect([pattern, error.position]).toEqual([pattern, position]);
		expect(error.message).toContain(`${name} are not built yet`);
		expect(error.message).toContain(`position ${position}`);
	}
});

test("anything else is no symbol: spaces, digits, small letters, names of object properties", () => {
	for (const [pattern, position] of [
		["M E", 2],
		["M2", 2],
		["m", 1],
		["MEW", 3],
		["M\u{1F600}*x", 2],
	] as const) {
		const error = refusal(pattern);
		expect([pattern, error.position]).toEqual([pattern, position]);
		expect(error.message).toContain("is no layer symbol");
	}
});

test("an empty pattern is refused", () => {
	for (const pattern of ["", "|", "||"]) expect(refusal(pattern).message).toContain("it is empty");
});

test("| cuts a pattern into segments, which may be empty; positions count it", () => {
	expect(parseSegments("M*|E-||M").map((segment) => segment.join(""))).toEqual(["M*", "E-", "", "M"]);
	expect(parseHybridPattern("M*|E-||M")).toEqual([..."M*E-M"] as ReturnType<typeof parseHybridPattern>);
	expect(refusal("M|*|[E").position).toBe(5);
});

test("segments of a pipeline: as cut, or equal ones; one stage takes all", () => {
	expect(segmentLengths("M*|E-||M", 2)).toEqual([2, 2, 0, 1]);
	expect(segmentLengths("M*|E-||M", 1)).toEqual([5]);
	expect(segmentLengths("M*E-MM", 3)).toEqual([2, 2, 2]);
	expect(pipelineObjection("M*|E-||M", 4)).toBeNull();
	expect(pipelineObjection("M*|E-||M", 3)).toContain("4 segments");
	expect(pipelineObjection("M*E-M", 2)).toContain("5 layers");
});
