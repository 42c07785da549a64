import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice(1);
});
afterAll(() => device[Symbol.dispose]());

describe("Sequences", () => {
	test("packs lengths, empty ones too", () => {
		using sequences = Sequences.of(device, [3, 0, 5, 1]);
		expect([...sequences.cuSeqlens.toInt32()]).toEqual([0, 3, 3, 8, 9]);
		expect([sequences.count, sequences.tokens, sequences.maxSeqlen]).toEqual([4, 9, 5]);
	});

	test("a batch is equal lengths, nothing is a batch of none", () => {
		using batch = Sequences.batch(device, 2, 7);
		expect([...batch.cuSeqlens.toInt32()]).toEqual([0, 7, 14]);
		expect(batch.lengths).toEqual([7, 7]);
		using none = Sequences.batch(device, 0, 7);
		expect([...none.cuSeqlens.toInt32()]).toEqual([0]);
		expect([none.count, none.tokens, none.maxSeqlen]).toEqual([0, 0, 0]);
	});

	test("refuses lengths that are none", () => {
		expect(() => Sequences.of(device, [2, -1])).toThrow("Sequence 1 cannot have -1 tokens.");
		expect(() => Sequences.of(device, [1.5])).toThrow("Sequence 0 cannot have 1.5 tokens.");
	});
});
