import { expect, test } from "bun:test";
import {
	countLayers,
	PatternError,
	parseHybridPattern,
	parsePattern,
	pipelineObjection,
	segmentLengths,
	storedPattern,
	symbolsOf,
	withoutCuts,
} from "../../src/config/hybrid-pattern.ts";

test("one symbol is one layer", () => {
	const layers = parseHybridPattern("ME*-M");
	expect(layers).toEqual(["mamba", "moe", "attention", "mlp", "mamba"]);
	expect(countLayers(layers, "mamba")).toBe(2);
	expect(countLayers(layers, "mlp")).toBe(1);
});

function refusal(pattern: string): PatternError {
	try {
		parseHybridPattern(pattern);
	} catch (error) {
		if (error instanceof PatternError) return error;
	}
	throw new Error(`${pattern} was accepted.`);
}

test("layers that are not supported are refused by name, at their position", () => {
	for (const [pattern, position, name] of [["MMD", 3, "DeepSeek sparse attention layers (D)"]] as const) {
		const error = refusal(pattern);
		expect([pattern, error.position]).toEqual([pattern, position]);
		expect(error.message).toContain(`${name} are not built yet`);
		expect(error.message).toContain(`position ${position}`);
	}
});

test("anything else is not a symbol: spaces, digits, small letters, names of object properties", () => {
	for (const [pattern, position] of [
		["M E", 2],
		["M2", 2],
		["m", 1],
		["MEW", 3],
		["M\u{1F600}*x", 2],
	] as const) {
		const error = refusal(pattern);
		expect([pattern, error.position]).toEqual([pattern, position]);
		expect(error.message).toContain("is not a layer symbol");
	}
});

test("an empty pattern is refused", () => {
	for (const pattern of ["", "|", "||"]) expect(refusal(pattern).message).toContain("it is empty");
});

/** The blocks of every segment, as text. */
function blocksOf(pattern: string): string[][] {
	return parsePattern(pattern).segments.map((segment) => segment.map(symbolsOf));
}

test("| cuts a pattern into segments, which may be empty; positions count it", () => {
	expect(blocksOf("M*|E-||M")).toEqual([["M", "*"], ["E", "-"], [], ["M"]]);
	expect(parseHybridPattern("M*|E-||M")).toEqual(parseHybridPattern("M*E-M"));
	expect(refusal("M|*|x").position).toBe(5);
});

test("brackets make several layers one block", () => {
	expect(blocksOf("M[M*]-")).toEqual([["M", "M*", "-"]]);
	expect(blocksOf("[ME]|[M*E]")).toEqual([["ME"], ["M*E"]]);
	expect(parseHybridPattern("[M*E]").length).toBe(3);
	expect(["M[M*]-", "MM*-"].map((pattern) => parsePattern(pattern).grouped)).toEqual([true, false]);
	expect(withoutCuts("M[M*]|-/*E")).toBe("MM*-/*E");
});

test("/ begins an MTP depth; empty depths alone are none", () => {
	const mtp = (pattern: string) => parsePattern(pattern).mtp;
	expect(mtp("ME*M-/*E")).toEqual({ depths: 1, layers: ["attention", "moe"] });
	expect(mtp("M*|ME-/*E/*E")).toEqual({ depths: 2, layers: ["attention", "moe"] });
	for (const pattern of ["M*", "M*/", "M*//"]) expect(mtp(pattern)).toBeNull();
	expect(parseHybridPattern("M*/*E")).toEqual(["mamba", "attention"]);
	expect(withoutCuts("M*//")).toBe("M*");
	expect(storedPattern("M[*-]/*E/*E", { repeated: false })).toBe("M*-/*E/*E");
	expect(storedPattern("M|*-/*E/*E", { repeated: true })).toBe("M*-/*E");
	expect(storedPattern("M*", { repeated: true })).toBe("M*");
});

test("every mistake of groups and MTP depths is refused at its position", () => {
	for (const [pattern, position, sentence] of [
		["M[*-", 2, "the group is not closed"],
		["M*]", 3, "no group is open"],
		["M[]", 3, "the group is empty"],
		["[M[*]]", 3, "groups cannot be nested"],
		["[MX]", 3, '"X" is not a layer symbol'],
		["[E*]", 3, "E must be the last of its group"],
		["[EE]", 3, "E must be the last of its group"],
		["[M|*]", 3, "| cuts a group"],
		["M/[*E]", 3, "groups cannot stand in a multi-token prediction part"],
		["M/*|E", 4, "| cannot stand in a multi-token prediction part"],
		["M/*E/*-", 6, "multi-token prediction parts must be equal; the first has *E, this one *-"],
		["M/*E/", 6, "the first has *E, this one no layers"],
		["M//*E", 4, "the first has no layers, this one *E"],
		["M/*Q", 4, '"Q" is not a layer symbol'],
		["*D", 2, "DeepSeek sparse attention layers (D) are not built yet"],
		["/*E", 0, "it is empty"],
		["M".repeat(5000), 0, "at most 4096 are read"],
	] as const) {
		const error = refusal(pattern);
		expect([pattern.slice(0, 20), error.position]).toEqual([pattern.slice(0, 20), position]);
		expect(error.message).toContain(sentence);
	}
});

test("segments of a pipeline: as cut, or equal ones; one stage takes all", () => {
	expect(segmentLengths("M*|E-||M", 2)).toEqual([2, 2, 0, 1]);
	expect(segmentLengths("M*|E-||M", 1)).toEqual([5]);
	expect(segmentLengths("M*E-MM", 3)).toEqual([2, 2, 2]);
	expect(pipelineObjection("M*|E-||M", 4)).toBeNull();
	expect(pipelineObjection("M*|E-||M", 3)).toContain("4 segments");
	expect(pipelineObjection("M*E-M", 2)).toContain("5 layers");
	expect(segmentLengths("[M*E]-/*E", 2)).toEqual([2, 2]);
	expect(pipelineObjection("[M*E]-/*E", 2)).toContain("cuts no group; 2 would cut [M*E] of layers 0 to 2");
	expect(pipelineObjection("[M*][-E]", 2) ?? "").toBe("");
	expect(pipelineObjection("[M*E]|-", 2)).toBeNull();
});
