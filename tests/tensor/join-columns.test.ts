import { afterAll, beforeAll, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { joinColumns } from "../../src/tensor/ops/columns.ts";
import { checkGradients, randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

test("parts stand side by side, and each gets its columns of the gradient", () => {
	const rows = 3;
	checkGradients(device, {
		inputs: {
			a: { values: randomValues(rows * 2, 1), shape: [rows, 2] },
			b: { values: randomValues(rows * 4, 2), shape: [rows, 4] },
		},
		parameters: {},
		forward: (tape, { a, b }) => joinColumns(tape, [a!, b!]),
		reference: ({ a, b }) =>
			Float64Array.from({ length: rows * 6 }, (_, at) => {
				const [row, column] = [Math.floor(at / 6), at % 6];
				return column < 2 ? a![row * 2 + column]! : b![row * 4 + column - 2]!;
			}),
	});
});
