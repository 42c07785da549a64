/** Multi-token prediction against Megatron-LM's and the float64 engine's, and that the comparison notices a wrong term. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Device } from "../../src/native/device.ts";
import { namedTopology, parseLayout } from "../../src/parallel/layout.ts";
import { firstFailure, renderReport } from "../../src/parity/comparison.ts";
import { elasticFormat } from "../../src/parity/elastic/golden.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { mtpFormat, mtpReference } from "../../src/parity/mtp/parity.ts";
import { golden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { changed } from "./changed.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

for (const name of ["mtp-1", "mtp-2", "mtp-repeated-small", "mtp-means-small"]) {
	test(`${name} agrees in every probe, loss, gradient norm and expert bias`, async () => {
		const before = device.memoryStatistics().liveBytes;
		const report = await compareAlone(device, golden(name));
		expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
		expect(device.memoryStatistics().liveBytes).toBe(before);
	}, 30_000);
}

test("another weight of the prediction losses is noticed", async () => {
	const report = await compareAlone(device, golden("mtp-1"), {
		configure: changed("language", (config) => ({ ...config, mtp: { ...config.mtp!, lossScalingFactor: 0.1 } })),
	});
	expect(firstFailure(report)?.name).toBe("step 1 gradient of embedding.word_embeddings.weight");
});

/** Calls `use` with a copy of a reference whose transformer_config has `changes`; undefined removes a field. */
async function withConfig<Result>(
	name: string,
	changes: Readonly<Record<string, unknown>>,
	use: (folder: string) => Promise<Result> | Result,
): Promise<Result> {
	const folder = mkdtempSync(join(tmpdir(), "mimo-mtp-"));
	try {
		for (const file of ["golden.json", "batches.safetensors", "model.safetensors"])
			symlinkSync(join(golden(name), file), join(folder, file));
		const config = JSON.parse(readFileSync(join(golden(name), "config.json"), "utf8"));
		const transformer = { ...config.transformer_config, ...changes };
		writeFileSync(join(folder, "config.json"), JSON.stringify({ ...config, transformer_config: transformer }));
		return await use(folder);
	} finally {
		rmSync(folder, { recursive: true });
	}
}

test("the mean of the gradient and the repetition of depths are the reference's", async () => {
	const tokens = { calculate_per_token_loss: true };
	const report = await withConfig("mtp-means-small", tokens, (folder) => compareAlone(device, folder));
	expect(firstFailure(report)?.name).toBe("step 1 gradient of embedding.word_embeddings.weight");
	const several = { mtp_use_repeated_layer: undefined };
	await expect(withConfig("mtp-repeated-small", several, (folder) => compareAlone(device, folder))).rejects.toThrow(
		"golden.json has no step1_probe of mtp.layers.1.eh_proj.",
	);
});

test("a field that the comparison does not know, or another value than its model has, is refused by name", async () => {
	const unknown = "this field is unknown, so what it does to the model or the objective would not be compared.";
	for (const [name, format, changes, message] of [
		["mtp-1", mtpFormat, { moe_router_force_bias: 0.5 }, `transformer_config.moe_router_force_bias: ${unknown}`],
		["elastic-soft", elasticFormat, { window_size: 8 }, `transformer_config.window_size: ${unknown}`],
		["mtp-1", mtpFormat, { add_bias_linear: true }, "transformer_config.add_bias_linear: "],
		["mtp-1", mtpFormat, { hidden_size: undefined }, "transformer_config.hidden_size: "],
	] as const) {
		const read = withConfig(name, changes, (folder) => format.read(folder));
		await expect(read).rejects.toThrow(`config.json: ${message}`);
	}
	await withConfig("mtp-1", { moe_grouped_gemm: true, num_layers: 5 }, (folder) => mtpFormat.read(folder));
});

test("a layout with other microbatches than the reference is refused where the mask has gaps", () => {
	const plan = (name: string, layout: string) => mtpReference.plan(namedTopology(parseLayout(layout)), golden(name));
	expect(plan("mtp-1", "dp2").microBatchSize).toBe(1);
	expect(plan("mtp-repeated-small", "dp3").microBatchSize).toBe(2);
	for (const [name, layout] of [
		["mtp-repeated-small", "dp6"],
		["mtp-2", "dp4"],
	] as const) {
		expect(() => plan(name, layout)).toThrow(
			/ needs microbatches of 1 sample instead of 2: .* the mask of .* has gaps, /,
		);
	}
});
