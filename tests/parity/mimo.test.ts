/** Both modules in one process against Megatron-LM's, and that the comparison notices a wrong term. */

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { EncoderConfig } from "../../src/models/vision/encoder.ts";
import { visionEncoder } from "../../src/models/vit/tower.ts";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { readMimoGolden } from "../../src/parity/mimo/golden.ts";
import { goldenEncoderConfig } from "../../src/parity/mimo/parity.ts";
import { golden, largeGolden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const folders = [
	"mimo-1x1-fixed",
	"mimo-1x1-dynamic",
	"mimo-tp2-tp2ep2-dynamic",
	"mimo-dp2-dp2ep2-fixed",
	"mimo-participation-exact",
];

describe("reference folders agree in every probe, loss and gradient norm", () => {
	// A larger folder takes the passes of its small one at more steps and sizes.
	const large = process.env.MIMO_TEST_FULL === "1" ? folders : ["mimo-1x1-dynamic"];
	for (const name of [...folders.map((folder) => `${folder}-small`), ...large]) {
		const path = name.endsWith("-small") ? golden(name) : largeGolden(name);
		test.skipIf(path === null)(
			name,
			async () => {
				const before = device.memoryStatistics().liveBytes;
				const report = await compareAlone(device, path!);
				expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
				expect(device.memoryStatistics().liveBytes).toBe(before);
			},
			60_000,
		);
	}
});

describe("a wrong term is noticed where it is", () => {
	const failure = async (name: string, configure: (config: EncoderConfig) => EncoderConfig) => {
		const options = {
			steps: 1,
			configure: changed("encoders", ([encoder]) => {
				const { config } = readMimoGolden(golden(name));
				return [{ ...encoder!, parts: visionEncoder(configure(goldenEncoderConfig(config, "f32"))) }];
			}),
		};
		return firstFailure(await compareAlone(device, golden(name), options))?.name;
	};

	test("attention scores that are not scaled", async () => {
		const found = await failure("mimo-1x1-fixed-small", (c) => ({ ...c, tower: { ...c.tower, softmaxScale: 1 } }));
		expect(found).toBe("step 1 vit.layer0");
	});

	test("positions cut to the image's proportions", async () => {
		const found = await failure("mimo-1x1-dynamic-small", (c) => ({
			...c,
			tower: { ...c.tower, positions: { ...c.tower.positions, aspectRatioSelect: true } },
		}));
		expect(found).toBe("step 1 vit.decoder_input");
	});

	test("a norm with another epsilon", async () => {
		const found = await failure("mimo-1x1-dynamic-small", (c) => ({ ...c, tower: { ...c.tower, normEpsilon: 1e-3 } }));
		expect(found).toBe("step 1 vit.layer0");
	});
});

test("the correction of another number of encoder ranks is refused", async () => {
	const path = golden("mimo-participation-corrected-small");
	expect(() => compareAlone(device, path)).toThrow("by 2 data-parallel encoder ranks over those that saw images");
});
