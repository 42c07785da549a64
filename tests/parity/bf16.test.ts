/** bf16 trainings beside fp32 references, and that the comparison notices a loss that is off. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import type { Device } from "../../src/native/device.ts";
import { bf16Report, firstFailure, relative, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { golden, largeGolden } from "../golden.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

test("the language model's losses in bf16", async () => {
	const report = await compareAlone(device, join(import.meta.dir, "../golden/hybrid-tiny"), { precision: "bf16" });
	expect(renderReport(report)).toEndWith("all 11 values agree.");
	// A run that had stayed in fp32 would agree to 1e-6.
	expect(Math.max(...report.checks.map(({ error }) => error))).toBeGreaterThan(1e-5);
});

test("both modules' losses in bf16", async () => {
	for (const path of [golden("mimo-1x1-fixed-small"), largeGolden("mimo-1x1-fixed")]) {
		if (path === null) continue;
		const report = await compareAlone(device, path, { precision: "bf16" });
		expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
	}
}, 60_000);

test("a loss that is off fails, and so does a drift that no single step shows", () => {
	const report = (actual: (step: number) => number) => ({
		folder: "reference",
		checks: Array.from({ length: 30 }, (_, index) => {
			const value = actual(index + 1);
			return { name: `step ${index + 1} loss`, expected: 2, actual: value, error: relative(value, 2), limit: 2e-6 };
		}),
	});
	const failure = (actual: (step: number) => number) => firstFailure(bf16Report(report(actual)))?.name;
	expect(failure(() => 2.009)).toBeUndefined();
	expect(failure((step) => (step === 10 ? 2.03 : 2))).toBe("step 10 loss");
	expect(failure((step) => (step === 11 ? 2.03 : 2))).toBeUndefined();
	expect(failure(() => 2.012)).toBe("mean loss of 30 steps");
	expect(failure(() => Number.NaN)).toBe("step 1 loss");
});
