/** Multi-token prediction against Megatron-LM's, and that the comparison notices a wrong term. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { mtpParity } from "../../src/parity/mtp/parity.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

for (const name of ["mtp-1", "mtp-2"]) {
	test(`${name} agrees in every probe, loss, gradient norm and expert bias`, async () => {
		const before = device.memoryStatistics().liveBytes;
		const report = await mtpParity(device, golden(name));
		expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
		expect(device.memoryStatistics().liveBytes).toBe(before);
	}, 30_000);
}

test("another weight of the prediction losses is noticed", async () => {
	const report = await mtpParity(device, golden("mtp-1"), {
		configure: (config) => ({ ...config, mtp: { ...config.mtp!, lossScalingFactor: 0.1 } }),
	});
	expect(firstFailure(report)?.name).toBe("step 1 gradient of embedding.word_embeddings.weight");
});
