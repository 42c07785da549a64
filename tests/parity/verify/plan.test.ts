/** Every layout gets the same samples, each exactly once a side. */
import { describe, expect, test } from "bun:test";
import type { ImageSet } from "../../../src/data/images.ts";
import { sampleLengths } from "../../../src/data/microbatch.ts";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import {
	dealtTo,
	encoderMicrobatches,
	languageMicrobatches,
	type Plan,
	participants,
	planOf,
	requireEqualMicrobatches,
} from "../../../src/parity/verify/samples.ts";
import { microBatchSizes, poolingReason } from "../../../src/parity/verify/subject.ts";
import { smallSubject } from "./subject.ts";

const subject = smallSubject();
const { samples } = subject;
const [encoder] = subject.encoders;
const plan = (layout: string, change: Partial<Parameters<typeof planOf>[1]> = {}) =>
	planOf(namedTopology(parseLayout(layout)), {
		samples: samples.length,
		microBatchSize: 2,
		sequenceLength: 64,
		...change,
	});

describe("samples", () => {
	test("hold as many image tokens as image rows, and labels for text alone", () => {
		for (const { text, features } of samples) {
			const images = features.radio_encoder!;
			const rows = images.grids.reduce((sum, grid) => sum + encoder!.parts.tower.rowsOf(grid), 0);
			expect(text.ids.filter((id) => id === encoder!.placeholderId)).toHaveLength(rows);
			text.labels.forEach((label, at) => {
				expect(text.lossMask[at]).toBe(label === -100 ? 0 : 1);
				if (label !== -100) expect(label).toBe(text.ids[at + 1]!);
				expect(label).not.toBe(encoder!.placeholderId);
			});
		}
	});

	test("are uneven, some of two images, some without", () => {
		const counts = samples.map(({ features }) => features.radio_encoder!.grids.length);
		expect(counts).toEqual([1, 2, 0, 1, 1, 2, 0, 0]);
		const rows = samples.map(({ text }) => text.ids.filter((id) => id === encoder!.placeholderId).length);
		expect(new Set(rows).size).toBeGreaterThan(3);
		expect(samples.flatMap(({ features }) => features.radio_encoder!.indices)).toEqual([0, 1, 2, 3, 4, 5, 6]);
	});

	test("are packs of three sequences, whose last tokens have no label", () => {
		const ends = samples.map(({ text }) => {
			let end = 0;
			return text.lengths.map((length) => {
				end += length;
				expect(text.labels[end - 1]).toBe(-100);
				return end;
			});
		});
		for (const [sample, found] of ends.entries()) {
			expect(found).toHaveLength(3);
			expect(found[2]).toBe(samples[sample]!.text.ids.length);
		}
		expect(new Set(ends.map(String)).size).toBe(samples.length);
	});

	test("repeat", () => expect(smallSubject().samples).toEqual(samples));
});

/** Images by their place in the batch, with what they hold. */
function imagesOf(sets: readonly ImageSet[]): [number, string][] {
	return sets.flatMap(({ patches, grids, indices }) => {
		let at = 0;
		return grids.map(({ rows, columns }, i): [number, string] => {
			const values = patches.subarray(at, at + rows * columns * 192);
			at += values.length;
			return [indices![i]!, `${rows} × ${columns} ${values[0]} ${values.at(-1)}`];
		});
	});
}
const lanes = (count: number) => Array.from({ length: count }, (_, lane) => lane);
const languageOf = (p: Plan) => lanes(p.topology.language.lanes).map((lane) => languageMicrobatches(p, samples, lane));
const encoderOf = (p: Plan) =>
	lanes(p.topology.encoders[0]!.lanes).map((lane) =>
		encoderMicrobatches(p, samples, p.topology.featureEdges[0]!, lane),
	);

for (const layout of ["1+1", "2+4", "4+2", "4+1", "tp2dp2+tp2dp2ep2", "1+dp8"]) {
	test(`${layout} deals every sample out once a side, rows in the lane's order`, () => {
		const p = plan(layout);
		const one = dealtTo(0, plan("1"), samples);
		const ids = (batches: readonly { readonly ids: Int32Array }[]) => batches.flatMap((batch) => [...batch.ids]);
		expect(ids(languageOf(p).flat())).toEqual(ids(one.map(({ text }) => text)));
		const images = imagesOf(encoderOf(p).flat()).sort(([a], [b]) => a - b);
		expect(images).toEqual(imagesOf(one.map((batch) => batch.features.radio_encoder!)));
		for (const batches of encoderOf(p)) expect(batches).toHaveLength(p.microbatches);
		// Images that a language lane receives: the parts of its sources, or its part of its source's.
		const [sources, destinations] = [p.topology.encoders[0]!.lanes, p.topology.language.lanes];
		for (const [lane, batches] of languageOf(p).entries()) {
			for (const [m, text] of batches.entries()) {
				const perSample = encoderOf(p).flatMap((sets, source) => {
					const share = sets[m]!.imagesPerSample;
					if (sources >= destinations) return Math.floor((source * destinations) / sources) === lane ? share : [];
					const [part, parts] = [lane % (destinations / sources), destinations / sources];
					if (Math.floor(lane / parts) !== source) return [];
					return share.slice((part * share.length) / parts, ((part + 1) * share.length) / parts);
				});
				const first = (lane * p.microbatches + m) * p.microBatchSize;
				const expected = samples
					.slice(first, first + sampleLengths(text).length)
					.map(({ features }) => features.radio_encoder!.grids.length);
				expect(perSample).toEqual(expected);
			}
		}
	});
}

describe("the micro-batch size", () => {
	test("adapts to what a layout can deal out", () => {
		expect(
			[plan("2+4"), plan("4+2"), plan("4+1"), plan("1+dp8")].map((p) => [p.microBatchSize, p.microbatches]),
		).toEqual([
			[2, 1],
			[2, 2],
			[2, 4],
			[1, 1],
		]);
		expect(plan("1", { microBatchSize: 8 }).microbatches).toBe(1);
		expect(plan("1+tp8", { microBatchSize: 1, sequenceLength: 4 }).microBatchSize).toBe(2);
	});

	test("is refused where nothing fits", () => {
		expect(() => plan("1+3")).toThrow(
			"Layout 1+3: global-batch-size 8 cannot be dealt out to 3 data lanes of the language model.",
		);
		expect(() => plan("1+tp8dp8", { sequenceLength: 4 })).toThrow(
			/^Layout 1\+tp8dp8: no micro-batch size divides a lane's 1 sample .* cut over 8 ranks\.$/,
		);
	});
});

test("an encoder rank participates when any of its microbatches has an image", () => {
	const withImages = samples.map(({ features }) => features.radio_encoder!.grids.length > 0);
	expect(["1+1", "2+1", "4+4", "1"].map((layout) => participants(plan(layout), withImages))).toEqual([1, 2, 3, 1]);
});

describe("microbatches of the reference", () => {
	const pack = (sequences: number) => ({
		text: { ...samples[0]!.text, lengths: [...new Array(sequences - 1).fill(1), 65 - sequences] },
		features: samples[0]!.features,
	});

	test("hold single samples, and the layouts' hold several", () => {
		expect(poolingReason(subject)).toBeNull();
		expect(microBatchSizes(subject)).toEqual({ reference: 1, layouts: 2 });
		expect(microBatchSizes({ ...subject, microBatchSize: 4 })).toEqual({ reference: 1, layouts: 4 });
		expect(poolingReason({ ...subject, samples: [pack(3), pack(3)] })).toBeNull();
	});

	test("are those of every layout where a loss depends on them", () => {
		const packed = { ...subject, microBatchSize: 1, samples: [pack(2), pack(5)] };
		const reason = poolingReason(packed)!;
		expect(reason).toEndWith("the packs of this batch hold 2 to 5");
		expect(microBatchSizes(packed)).toEqual({ reference: 1, layouts: 1 });
		const pooled = smallSubject({ "moe-router-load-balancing-type": ["aux_loss"] });
		expect(poolingReason(pooled)).toStartWith("moe-router-load-balancing-type aux_loss balances");
		expect(() => requireEqualMicrobatches(plan("1+tp8", { sequenceLength: 2 }), plan("1"), reason)).toThrow(
			/^Layout 1\+tp8 needs microbatches of 4 samples instead of 2: results depend on it, because moe-router/,
		);
		requireEqualMicrobatches(plan("1+2"), plan("1"), reason);
	});
});

test("what depends on the layout is refused by name", () => {
	expect(() => smallSubject({ "moe-router-load-balancing-type": ["global_aux_loss"] })).toThrow(
		/^Results depend on the layout here: moe-router-load-balancing-type global_aux_loss /,
	);
	const fp8 = { device: "cpu", "fp8-format": "e4m3", "fp8-recipe": "blockwise", "fp8-emulate": true };
	expect(() => smallSubject({ ...fp8, "fp8-modules": ["experts", "projections"] })).toThrow(
		/^Results depend on the layout here: fp8-modules projections rounds blocks /,
	);
	const corrected = { "encoder-grad-participation": "corrected" };
	expect(() => smallSubject(corrected)).toThrow(/counts encoder ranks/);
	expect(smallSubject(corrected, "policies").samples).toHaveLength(8);
	expect(() => smallSubject({ bf16: true })).toThrow(/bf16 rounds/);
	const alone = { "model-provider": "nemotron-moe-vlm", "llm-only": true };
	expect(() => smallSubject(alone, "policies")).toThrow(/has no encoder\.$/);
	expect(smallSubject(alone).samples.every(({ features }) => Object.keys(features).length === 0)).toBe(true);
});
