/** Elastic models against Megatron-LM's, and that the comparison notices a wrong rule. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { elastic } from "../../src/guests/elastic/elastic.ts";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

for (const name of ["elastic-soft", "elastic-hard", "elastic-hetero"]) {
	test(`${name} agrees in every choice, loss and gradient norm`, async () => {
		const before = device.memoryStatistics().liveBytes;
		const report = await compareAlone(device, golden(name));
		expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
		expect(device.memoryStatistics().liveBytes).toBe(before);
	}, 60_000);
}

test("this program's own count of parameters is noticed", async () => {
	const report = await compareAlone(device, golden("elastic-soft"), {
		configure: changed("guests", (guests) => {
			const { options } = guests[0] as ReturnType<typeof elastic>;
			return [elastic({ ...options, config: { ...options.config, compat: false } })];
		}),
	});
	expect(firstFailure(report)?.name).toBe("submodel 8 loss");
}, 60_000);
