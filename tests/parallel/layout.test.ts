import { expect, test } from "bun:test";
import { layoutFor, parseLayout, parseLayouts, topologyOfLayout } from "../../src/parallel/layout.ts";
import { UserError } from "../../src/system/errors.ts";

const one = { tensor: 1, data: 1, pipeline: 1, expert: 1, expertTensor: 1 };

function refusal(text: string): string {
	try {
		parseLayouts(text);
	} catch (error) {
		if (error instanceof UserError) return error.message;
		throw error;
	}
	throw new Error(`${text} was accepted.`);
}

test("pieces in any order, bare numbers are dp", () => {
	expect(parseLayout("tp2dp2+tp2dp4ep2etp2")).toEqual({
		text: "tp2dp2+tp2dp4ep2etp2",
		encoders: [{ shape: { ...one, tensor: 2, data: 2 }, colocated: false }],
		language: { ...one, tensor: 2, data: 4, expert: 2, expertTensor: 2 },
	});
	expect(parseLayout("dp2|pp2").encoders.map(({ colocated }) => colocated)).toEqual([true]);
	expect(parseLayout("tp2pp2")).toMatchObject({ encoders: [], language: { ...one, tensor: 2, pipeline: 2 } });
	expect(parseLayout("1+ep2tp2").language).toEqual({ ...one, tensor: 2, expert: 2 });
	expect(parseLayout("cp2ep4dp2").language).toEqual({ ...one, context: 2, data: 2, expert: 4 });
	expect(parseLayout("2+4")).toMatchObject({
		encoders: [{ shape: { ...one, data: 2 } }],
		language: { ...one, data: 4 },
	});
	expect(parseLayout("etp2tp2+1").encoders[0]!.shape).toEqual({ ...one, tensor: 2, expertTensor: 2 });
});

test("1 alone is one process with both modules, 1+1 are two", () => {
	expect(parseLayout("1")).toEqual({ text: "1", encoders: [{ shape: one, colocated: true }], language: one });
	expect(topologyOfLayout(parseLayout("1"))).toMatchObject({ worldSize: 1, colocated: true });
	expect(topologyOfLayout(parseLayout("1+1"))).toMatchObject({ worldSize: 2, colocated: false });
});

test("several encoders, each on ranks of its own or on the language model's", () => {
	const { encoders, language } = parseLayout("2+tp2|dp2+pp2");
	expect(encoders).toEqual([
		{ shape: { ...one, data: 2 }, colocated: false },
		{ shape: { ...one, tensor: 2 }, colocated: true },
		{ shape: { ...one, data: 2 }, colocated: false },
	]);
	expect(language).toEqual({ ...one, pipeline: 2 });
	expect(layoutFor(parseLayout("1"), { encoders: 3 }).encoders).toHaveLength(3);
	expect(layoutFor(parseLayout("1"), { encoders: 0 }).encoders).toEqual([]);
	expect(() => layoutFor(parseLayout("1+1"), { encoders: 2 })).toThrow(
		"Layout 1+1: it has sides for 1 encoder, and the model has 2.",
	);
});

test("the layouts of a list, in its order", () => {
	const layouts = parseLayouts("1+1,1+tp2, tp2+tp2ep2,dp2+dp2ep2,2+4,4+2,tp2dp2+tp2dp2ep2");
	expect(layouts.map(({ text }) => text)[2]).toBe("tp2+tp2ep2");
	expect(layouts.map((layout) => topologyOfLayout(layout).worldSize)).toEqual([2, 3, 4, 4, 6, 6, 8]);
});

test("fan-out and fan-in", () => {
	const routes = (text: string) =>
		topologyOfLayout(parseLayout(text)).featureEdges[0]!.routes.map(
			({ source, destination }) => `${source}→${destination}`,
		);
	expect(routes("2+4")).toEqual(["0→0", "0→1", "1→2", "1→3"]);
	expect(routes("4+2")).toEqual(["0→0", "1→0", "2→1", "3→1"]);
	expect(routes("dp2+dp2ep2")).toEqual(["0→0", "1→1"]);
});

test("a mistake is named with its piece and position", () => {
	expect(refusal("pp2|pp2")).toBe(
		'Layout "pp2|pp2": pp2 at position 1: an encoder in pipeline stages needs ranks of its own (+).',
	);
	expect(refusal("dp2|tp2dp2")).toContain(
		"tp2dp2 at position 5: 4 ranks of the language model are not the encoder's 2",
	);
	expect(refusal("1+")).toBe('Layout "1+": at position 3: a side is missing.');
	expect(refusal("+1")).toContain("at position 1: a side is missing");
	expect(refusal("")).toContain("at position 1: a layout is ENCODER+LANGUAGE");
	const piece = "a piece is tp, cp, dp, pp, ep or etp and a whole number from 1; a bare number stands alone";
	expect(refusal("cp2+1")).toContain("cp2 at position 1: an encoder has no context parallelism");
	expect(refusal("1+tp2xp3")).toBe(`Layout "1+tp2xp3": xp3 at position 6: ${piece}.`);
	expect(refusal("1+tp0")).toContain(`tp0 at position 3: ${piece}`);
	expect(refusal("1+tp")).toContain(`tp at position 3: ${piece}`);
	expect(refusal("1+2tp2")).toContain(`2 at position 3: ${piece}`);
	expect(refusal("1+dp2.5")).toContain(`dp2.5 at position 3: ${piece}`);
	expect(refusal("1+tp2 ep2")).toContain("tp2 at position 3");
	expect(refusal("1+0")).toContain(`0 at position 3: ${piece}`);
	expect(refusal("1+TP2")).toContain(`TP2 at position 3: ${piece}`);
	expect(refusal("1+1, tp2tp4+1")).toContain("tp4 at position 9: tp is given a second time");
	expect(refusal("1+tp2ep3")).toContain("ep3 at position 6: ep × etp (3) has to divide the 2 ranks of tp × cp × dp");
	expect(refusal("1+ep2etp2tp2")).toContain(
		"etp2 at position 6: ep × etp (4) has to divide the 2 ranks of tp × cp × dp",
	);
	expect(refusal("3+tp2dp2")).toContain(
		"tp2dp2 at position 3: 2 data lanes do not match the encoder's 3: one number has to be a multiple of the other",
	);
});
