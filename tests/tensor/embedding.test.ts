import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { embedding } from "../../src/tensor/ops/embedding.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

/** Token ids below `vocabulary`, half of them equal. */
function someIds(tokens: number, vocabulary: number): Int32Array {
	return Int32Array.from({ length: tokens }, (_, i) => (i % 2 === 0 ? 3 : (i * 7919) % vocabulary));
}

function rowsOf(table: Float64Array, ids: Int32Array, width: number, start: number): Float64Array {
	const rows = table.length / width;
	return Float64Array.from({ length: ids.length * width }, (_, i) => {
		const row = ids[Math.floor(i / width)]! - start;
		return row >= 0 && row < rows ? table[row * width + (i % width)]! : 0;
	});
}

describe("embedding", () => {
	for (const [tokens, vocabulary, width, start] of [
		[7, 11, 5, 0],
		[33, 9, 70, 2],
		[0, 4, 3, 0],
	] as const) {
		test(`${tokens} tokens of [${vocabulary}, ${width}] from ${start}`, () => {
			const ids = someIds(tokens, vocabulary + 2 * start);
			using idTensor = Tensor.from(device, ids);
			checkGradients(device, {
				inputs: {},
				parameters: { table: { values: randomValues(vocabulary * width, 1), shape: [vocabulary, width] } },
				forward: (tape, _, { table }) => embedding(tape, idTensor, table!, { vocabularyStart: start }),
				reference: ({ table }) => rowsOf(table!, ids, width, start),
			});
		});
	}

	test("scaled rows, and no gradient of a padding id's", () => {
		const ids = Int32Array.of(3, 1, 2, 3, 5, 1);
		using idTensor = Tensor.from(device, ids);
		using table = new Parameter("t", Tensor.from(device, randomValues(24, 1), [6, 4]), Tensor.zeros(device, [6, 4]));
		const tape = new Tape(device, { recording: true });
		using y = embedding(tape, idTensor, table, { scale: 1.5, paddingId: 3 });
		const values = table.value.toFloat32();
		expect([...y.toFloat32()]).toEqual(
			Array.from(ids).flatMap((id) => [...values.subarray(4 * id, 4 * id + 4).map((x) => 1.5 * x)]),
		);
		y.gradient!.accumulate(Tensor.from(device, new Float32Array(24).fill(2), [6, 4]));
		tape.backward();
		const rows = [0, 6, 3, 0, 0, 3];
		expect([...table.mainGradient!.toFloat32()]).toEqual(rows.flatMap((row) => Array<number>(4).fill(row)));
	});

	test("two threads add in the order one does", async () => {
		const run = (on: Device) => {
			const ids = someIds(3000, 50);
			using idTensor = Tensor.from(on, ids);
			using table = new Parameter("t", Tensor.zeros(on, [50, 200]), Tensor.zeros(on, [50, 200]));
			const tape = new Tape(on, { recording: true });
			using y = embedding(tape, idTensor, table);
			y.gradient!.accumulate(Tensor.from(on, randomValues(3000 * 200, 5), [3000, 200]));
			tape.backward();
			return table.mainGradient!.toFloat32();
		};
		using single = await testDevice(1);
		expect(run(device)).toEqual(run(single));
	});
});
