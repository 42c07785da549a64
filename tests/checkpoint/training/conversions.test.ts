/** Trainings that go on through conversions: the same losses as without them, bit by bit. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import type { Device } from "../../../src/native/device.ts";
import { testDevice } from "../../support.ts";
import { conversionOptions } from "../conversion/options.ts";
import { trained } from "./in-process.ts";

let device: Device;
let folder: string;
beforeAll(async () => {
	device = await testDevice();
	folder = mkdtempSync(join(tmpdir(), "mimo-conversions-"));
});
afterAll(() => {
	device[Symbol.dispose]();
	rmSync(folder, { recursive: true });
});
const at = (name: string) => join(folder, name);

type Change = Omit<Parameters<typeof conversionOptions>[0], "source" | "target">;

async function convert(source: string, target: string, change: Change): Promise<readonly string[]> {
	using planned = planConversion(conversionOptions({ source: at(source), target: at(target), ...change }));
	await planned.run(() => {});
	return [...planned.tensors.tensors.keys()];
}

const predicting = "--hybrid-layer-pattern ME*-/*E/*E";

test("multi-token prediction through torch_dist", async () => {
	await trained(device, `${predicting} --train-iters 2 --save ${at("mtp")}`, at("mtp.jsonl"));
	const names = await convert("mtp", "mtp-megatron", { from: "native", to: "torch_dist" });
	for (const name of [
		"mtp.layers.1.eh_proj.weight",
		"mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight",
		"mtp.layers.1.mtp_model_layer.layers.1.mlp.experts.experts.linear_fc1.weight",
		"optimizer.state.exp_avg.mtp.layers.1.final_layernorm.weight",
	]) {
		expect(names).toContain(name);
	}
	await convert("mtp-megatron", "mtp-back", { from: "torch_dist", to: "native" });
	const direct = await trained(device, `${predicting} --train-iters 4 --load ${at("mtp")}`, at("direct.jsonl"));
	const back = await trained(device, `${predicting} --train-iters 4 --load ${at("mtp-back")}`, at("back.jsonl"));
	expect(Object.keys(direct)).toEqual(["3", "4"]);
	expect(direct[3]).toMatchObject({ "mtp_2 loss": expect.any(Number) });
	expect(back).toEqual(direct);
}, 30_000);

test("multi-token prediction through Hugging Face", async () => {
	const names = await convert("mtp", "mtp-hf", { from: "native", to: "hf" });
	for (const name of [
		"mtp.layers.0.eh_proj.weight",
		"mtp.layers.1.final_layernorm.weight",
		"mtp.layers.2.mixer.q_proj.weight",
		"mtp.layers.3.mixer.experts.3.down_proj.weight",
	]) {
		expect(names).toContain(name);
	}
	const config = JSON.parse(readFileSync(join(at("mtp-hf"), "config.json"), "utf8"));
	expect(config).toMatchObject({
		hybrid_override_pattern: "ME*-",
		num_hidden_layers: 4,
		num_nextn_predict_layers: 2,
		mtp_hybrid_override_pattern: "*E",
		mtp_layers_block_type: ["full_attention", "moe"],
	});
	const flags = "--train-iters 2 --finetune";
	const weights = await trained(device, `${predicting} ${flags} --load ${at("mtp")}`, at("weights.jsonl"));
	const saved = `--load-hf ${at("mtp-hf")} --save-hf ${at("mtp-saved")}`;
	expect(await trained(device, `${predicting} --train-iters 2 ${saved}`, at("hf.jsonl"))).toEqual(weights);
	expect(readFileSync(join(at("mtp-saved"), "config.json"), "utf8")).toBe(
		readFileSync(join(at("mtp-hf"), "config.json"), "utf8"),
	);
}, 30_000);

test("repeated depths are one depth of a folder", async () => {
	const repeated = `${predicting} --mtp-use-repeated-layer`;
	await trained(device, `${repeated} --train-iters 1 --save ${at("repeated")} --save-hf ${at("saved")}`, at("a.jsonl"));
	await convert("repeated", "repeated-megatron", { from: "native", to: "torch_dist" });
	await convert("repeated-megatron", "repeated-hf", { from: "torch_dist", to: "hf" });
	for (const path of ["saved", "repeated-hf"]) {
		const config = JSON.parse(readFileSync(join(at(path), "config.json"), "utf8"));
		expect([config.num_nextn_predict_layers, config.mtp_hybrid_override_pattern]).toEqual([1, "*E"]);
		for (const [depths, pattern] of [
			[1, "--hybrid-layer-pattern ME*-/*E"],
			[2, predicting],
		] as const) {
			const flags = `${pattern} --mtp-use-repeated-layer --train-iters 1 --load-hf ${at(path)}`;
			const steps = await trained(device, flags, at(`${path}-${depths}.jsonl`));
			expect(Object.keys(steps[1]!).filter((name) => name.startsWith("mtp_"))).toHaveLength(depths);
		}
	}
	const differing = trained(device, `${predicting} --train-iters 1 --load-hf ${at("saved")}`, at("b.jsonl"));
	await expect(differing).rejects.toThrow('says "ME*-/*E"');
}, 30_000);
