/** Image rows at their tokens (docs/spec/vision.md §4.1, §G7). */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { checkImageRows, findImagePlaces, placeImageRows, placement } from "../../../src/models/vision/merge.ts";
import type { Device } from "../../../src/native/device.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const ids = Int32Array.of(5, 9, 9, 6, 7, 8, 9, 4, 9, 3);
const places = findImagePlaces(ids, [5, 5], 9);
const tp = groupOfOne("language.tp", 0);

test("the k-th image token takes the k-th row and embeds as zeros", () => {
	expect([...places.ids]).toEqual([5, -1, -1, 6, 7, 8, -1, 4, -1, 3]);
	expect([...places.rowOfToken]).toEqual([-1, 0, 1, -1, -1, -1, 2, -1, 3, -1]);
	expect(places.placesPerSample).toEqual([2, 2]);
});

test("values and gradients of text and rows", () => {
	using matrix = placement(device, places, tp);
	expect(matrix.transposed.rows).toBe(4);
	checkGradients(device, {
		inputs: {
			text: { values: randomValues(30, 1), shape: [10, 3] },
			rows: { values: randomValues(12, 2), shape: [4, 3] },
		},
		forward: (tape, { text, rows }) => placeImageRows(tape, text!, rows!, matrix, tp),
		reference: ({ text, rows }) =>
			text!.map((value, i) => {
				const row = places.rowOfToken[Math.floor(i / 3)]!;
				return row < 0 ? value : value + rows![row * 3 + (i % 3)]!;
			}),
	});
});

test("a rank with its own run of the tokens places the rows that fall into it", () => {
	for (const rank of [0, 1]) {
		using matrix = placement(device, places, { ...tp, rank, size: 2 });
		expect([...matrix.host.column]).toEqual(rank === 0 ? [0, 1] : [2, 3]);
		expect([matrix.rows, matrix.columns]).toEqual([5, 4]);
	}
});

test("text alone: no rows, the embedding as it is", () => {
	const text = findImagePlaces(Int32Array.of(1, 2, 3), [3], 9);
	checkImageRows(text, [0], { module: "radio_encoder", place: "microbatch 0" });
	using matrix = placement(device, text, tp);
	using embedded = Tensor.from(device, randomValues(6, 1), [3, 2]);
	using rows = Tensor.empty(device, [0, 2]);
	using merged = placeImageRows(new Tape(device, { recording: false }), embedded, rows, matrix, tp);
	expect(merged.toFloat32()).toEqual(embedded.toFloat32());
});

test("rows that do not match the tokens are refused, naming the sample", () => {
	expect(() => checkImageRows(places, [2, 3], { module: "radio_encoder", place: "microbatch 4" })).toThrow(
		"Sample 1 of microbatch 4 has 2 image tokens but 3 image rows.",
	);
	expect(() => checkImageRows(places, [4], { module: "radio_encoder", place: "microbatch 4" })).toThrow(
		"microbatch 4 has 2 samples of text and 1 of image rows.",
	);
});
