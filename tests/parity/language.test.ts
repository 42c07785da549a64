/** The language model against Hugging Face's, and that the comparison notices a wrong term. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../src/checkpoint/conversion/convert.ts";
import { openSafetensors, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import type { Device } from "../../src/native/device.ts";
import { firstFailure, type ParityReport, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { conversionOptions } from "../checkpoint/conversion/options.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
let folder: string;
beforeAll(async () => {
	device = await testDevice();
	folder = mkdtempSync(join(tmpdir(), "mimo-parity-"));
});
afterAll(() => {
	device[Symbol.dispose]();
	rmSync(folder, { recursive: true });
});

function expectFailure(report: ParityReport, name: RegExp): void {
	const failure = firstFailure(report);
	expect(failure?.name).toMatch(name);
	expect(renderReport(report)).toContain(`FAILED, first at ${failure!.name}`);
}

describe("reference folders agree in every probe, loss and gradient norm", () => {
	for (const name of ["layer-mamba", "layer-attention", "layer-mlp", "layer-moe", "hybrid-tiny", "nemotron-latent"]) {
		test(name, async () => {
			const before = device.memoryStatistics().liveBytes;
			const report = await compareAlone(device, golden(name));
			expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
			expect(device.memoryStatistics().liveBytes).toBe(before);
		});
	}
});

test("weights of a native checkpoint are as good as the folder's own", async () => {
	const [source, target] = [golden("hybrid-tiny"), join(folder, "native")];
	using plan = planConversion(conversionOptions({ from: "hf", to: "native", source, target, optimizer: false }));
	await plan.run(() => {});
	const report = await compareAlone(device, source, { weights: target });
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
});

test("hybrid-text, 60 steps with flipped routing decisions inside their bands", async () => {
	const report = await compareAlone(device, golden("hybrid-text"));
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
}, 30_000);

describe("a wrong term is noticed in the layer that has it", () => {
	test("no D skip in Mamba-2", async () => {
		const copy = join(folder, "no-d");
		cpSync(golden("hybrid-tiny"), copy, { recursive: true });
		using source = openSafetensors(golden("hybrid-tiny/model.safetensors"));
		const entries = [...source.tensors].map(([name, { dtype, shape }]) => {
			const data = source.read(name);
			if (name === "model.layers.3.mixer.D") data.fill(0 as never);
			return { name, dtype, shape, data: () => data };
		});
		writeSafetensors(join(copy, "model.safetensors"), entries);
		expectFailure(await compareAlone(device, copy), /^step 1 layer 3$/);
	});

	test("no top-k scaling", async () => {
		const report = await compareAlone(device, golden("hybrid-tiny"), {
			configure: changed("language", (config) => ({ ...config, moe: { ...config.moe, scalingFactor: 1 } })),
		});
		expectFailure(report, /^step 1 layer 1$/);
	});

	test("attention scores that are not scaled", async () => {
		const report = await compareAlone(device, golden("hybrid-tiny"), {
			configure: changed("language", (config) => ({ ...config, attention: { ...config.attention, softmaxScale: 1 } })),
		});
		expectFailure(report, /^step 1 layer [23]$/);
	});

	test("Δ without its lower limit", async () => {
		const report = await compareAlone(device, golden("hybrid-tiny"), {
			configure: changed("language", (config) => ({ ...config, mamba: { ...config.mamba, timeStepMinimum: 0 } })),
		});
		expectFailure(report, /dt_bias/);
	});
});
