/** Trainings that go on through conversions: the same losses as without them, bit by bit. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type PlannedConversion, planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { inspectCheckpoint } from "../../../src/checkpoint/conversion/inspect.ts";
import { type JsonObject, readCommon } from "../../../src/checkpoint/torch-dist/common.ts";
import { TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
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
const toMegatron = { from: "native", to: "torch_dist" } as const;
const toNative = { from: "torch_dist", to: "native" } as const;

function planned(source: string, target: string, change: Change): PlannedConversion {
	return planConversion(conversionOptions({ source: at(source), target: at(target), ...change }));
}

/** Returns the names of the tensors that were written. */
async function convert(source: string, target: string, change: Change): Promise<readonly string[]> {
	using plan = planned(source, target, change);
	await plan.run(() => {});
	return [...plan.tensors.tensors.keys()];
}

/** Shape and SHA-256 of every stored tensor. */
function digests(name: string): Record<string, string> {
	const { tensors } = inspectCheckpoint(at(name), { checksums: true, allowFallback: false });
	return Object.fromEntries(tensors.map(({ name, shape, dtype, sha256 }) => [name, `${shape} ${dtype} ${sha256}`]));
}

function argumentsIn(name: string): JsonObject {
	using folder = TorchDistFolder.open(at(name));
	return readCommon(folder, []).args as JsonObject;
}

/** Steps 3 and 4 from a checkpoint of step 2. */
function resumed(flags: string, from: string): ReturnType<typeof trained> {
	return trained(device, `${flags} --train-iters 4 --load ${at(from)}`, at(`${from}.jsonl`));
}

const predicting = "--hybrid-layer-pattern ME*-/*E/*E --mtp-loss-scaling-factor 0.2";

test("multi-token prediction through torch_dist", async () => {
	await trained(device, `${predicting} --train-iters 2 --save ${at("mtp")}`, at("mtp.jsonl"));
	const names = await convert("mtp", "mtp-megatron", toMegatron);
	for (const name of [
		"mtp.layers.1.eh_proj.weight",
		"mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight",
		"mtp.layers.1.mtp_model_layer.layers.1.mlp.experts.experts.linear_fc1.weight",
		"optimizer.state.exp_avg.mtp.layers.1.final_layernorm.weight",
	]) {
		expect(names).toContain(name);
	}
	await convert("mtp-megatron", "mtp-back", toNative);
	const direct = await resumed(predicting, "mtp");
	expect(Object.keys(direct)).toEqual(["3", "4"]);
	expect(direct[3]).toMatchObject({ "mtp_2 loss": expect.any(Number) });
	expect(await resumed(predicting, "mtp-back")).toEqual(direct);
	expect(await resumed(predicting, "mtp-megatron")).toEqual(direct);
	expect(digests("mtp-back")).toEqual(digests("mtp"));
	expect(argumentsIn("mtp-megatron")).toMatchObject({
		hybrid_layer_pattern: "ME*-/*E/*E",
		num_layers: 4,
		mtp_num_layers: 2,
		mtp_loss_scaling_factor: 0.2,
		mtp_use_repeated_layer: false,
	});
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
	await convert("repeated", "repeated-megatron", toMegatron);
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

describe("layers by bracket group", () => {
	const flat = "--hybrid-layer-pattern ME*-*E/*E";
	const pattern = "[ME][*-]*E/*E";

	test("flat, grouped keys and back: every byte, and the same training", async () => {
		await trained(device, `${flat} --train-iters 2 --save ${at("flat")}`, at("flat-first.jsonl"));
		const names = await convert("flat", "grouped", { ...toMegatron, layerNames: "logical", pattern });
		for (const name of [
			"decoder.layers.0.mixer.in_proj.weight.z",
			"decoder.layers.0.mlp.experts.experts.linear_fc1.weight",
			"decoder.layers.1.self_attention.linear_qkv.weight",
			"decoder.layers.1.mlp.linear_fc1.weight",
			"decoder.layers.3.pre_mlp_layernorm.weight",
			"decoder.final_layernorm.weight",
			"mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_proj.weight",
			"optimizer.state.exp_avg_sq.decoder.layers.1.mlp.linear_fc2.weight",
		]) {
			expect(names).toContain(name);
		}
		expect(names.filter((name) => /final_norm|decoder\.layers\.[4-9]/.test(name))).toEqual([]);
		expect(argumentsIn("grouped")).toMatchObject({ hybrid_layer_pattern: pattern, num_layers: 6, mtp_num_layers: 1 });
		using folder = TorchDistFolder.open(at("grouped"));
		expect(folder.objects.has("output_layer._extra_state/shard_0_1")).toBe(false);
		await convert("grouped", "ungrouped", toNative);
		expect(digests("ungrouped")).toEqual(digests("flat"));
		const direct = await resumed(flat, "flat");
		expect(await resumed(flat, "ungrouped")).toEqual(direct);
		expect(await resumed(flat, "grouped")).toEqual(direct);
		// Groups make no other model.
		expect(await resumed(`--hybrid-layer-pattern ${pattern}`, "grouped")).toEqual(direct);
		await convert("ungrouped", "grouped-again", toMegatron);
		expect(digests("grouped-again")).toEqual(digests("grouped"));
		await convert("ungrouped", "flat-megatron", { ...toMegatron, layerNames: "physical" });
		expect(argumentsIn("flat-megatron").hybrid_layer_pattern).toBe("ME*-*E/*E");
		await convert("flat", "flat-megatron-again", toMegatron);
		expect(digests("flat-megatron-again")).toEqual(digests("flat-megatron"));
	}, 30_000);

	test("what does not fit is named", () => {
		const refuse = (change: Partial<Change>, sentence: string) =>
			expect(() => planned("flat", "x", { ...toMegatron, layerNames: "logical", ...change })).toThrow(sentence);
		refuse({}, 'pattern "ME*-*E/*E" has no groups to count layers by; name them with --hybrid-layer-pattern');
		refuse({ pattern: "[ME][*-]E*/*E" }, 'has the layers "ME*-*E/*E", and the pattern given has "ME*-E*/*E"');
		refuse({ pattern: "ME[*-*]E/*E" }, 'group [*-*] of pattern "ME[*-*]E/*E" has two layers of a kind');
		// Two layers of a kind are refused in this mode alone.
		using physical = planned("flat", "x", { ...toMegatron, pattern: "ME[*-*]E/*E" });
		expect(physical.tensors.tensors.has("decoder.layers.4.self_attention.linear_qkv.weight")).toBe(true);
	});
});

describe("GPT models", () => {
	const blocks = "--hybrid-layer-pattern [*E][*E]";

	test("to GPT keys and back: every byte, and the same training", async () => {
		await trained(device, `${blocks} --train-iters 2 --save ${at("blocks")}`, at("blocks-first.jsonl"));
		await convert("blocks", "gpt", { ...toMegatron, layerNames: "gpt" });
		const stored = digests("gpt");
		expect(stored["decoder.layers.self_attention.linear_qkv.weight"]).toStartWith("2,64,32 F32");
		expect(stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"]).toStartWith("2,4,24,32 F32");
		expect(stored["optimizer.state.exp_avg.decoder.layers.mlp.router.weight"]).toStartWith("2,4,32 F32");
		expect(Object.keys(stored)).toContain("decoder.final_layernorm.weight");
		expect(Object.keys(stored).filter((name) => /layers\.\d|final_norm/.test(name))).toEqual([]);
		expect(argumentsIn("gpt")).toMatchObject({ hybrid_layer_pattern: null, num_layers: 2, moe_layer_freq: 1 });
		using folder = TorchDistFolder.open(at("gpt"));
		const states = [...folder.objects.keys()].filter((name) => name.includes("_extra_state"));
		for (const name of [
			"decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2",
			"decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4",
		]) {
			expect(states).toContain(name);
		}
		expect(states.filter((name) => name.startsWith("output_layer"))).toEqual([]);
		await convert("gpt", "blocks-back", toNative);
		expect(digests("blocks-back")).toEqual(digests("blocks"));
		const direct = await resumed(blocks, "blocks");
		expect(await resumed(blocks, "blocks-back")).toEqual(direct);
		expect(await resumed(blocks, "gpt")).toEqual(direct);
		await convert("blocks-back", "gpt-again", toMegatron);
		expect(digests("gpt-again")).toEqual(stored);
	}, 30_000);

	test("by order of each kind, with new Mamba-2 layers, which are left out on the way back", async () => {
		const pattern = "M*[*E]ME";
		const sizes = { mamba_num_heads: 4, mamba_head_dim: 8, mamba_num_groups: 2, mamba_state_dim: 8 };
		const newLayers = { seed: 77, sizes };
		{
			using plan = planned("gpt", "hybrid", { ...toNative, pattern, newLayers });
			expect(plan.notices[0]).toContain("without the Mamba-2 layers 0, 4: they get initial values (seed 77)");
			await plan.run(() => {});
		}
		const [hybrid, blocks] = [digests("hybrid"), digests("blocks")];
		const layer = (index: number, rest: string) => `language_model.decoder.layers.${index}.${rest}`;
		const qkv = "self_attention.linear_qkv.weight";
		expect([hybrid[layer(1, qkv)], hybrid[layer(2, qkv)]]).toEqual([blocks[layer(0, qkv)]!, blocks[layer(2, qkv)]!]);
		const router = "mlp.router.weight";
		expect([hybrid[layer(3, router)], hybrid[layer(5, router)]]).toEqual([
			blocks[layer(1, router)]!,
			blocks[layer(3, router)]!,
		]);
		// The values that a training from the start draws.
		const flags = `--hybrid-layer-pattern ${pattern} --seed 77`;
		await trained(device, `${flags} --lr 0 --min-lr 0 --train-iters 1 --save ${at("drawn")}`, at("drawn.jsonl"));
		const drawn = digests("drawn");
		// Conversions draw on the processor; another device's normal numbers may differ in the last bit.
		const names = ["mixer.A_log", "mixer.dt_bias", "mixer.conv1d_weight"];
		for (const name of device.library.kind === "cpu" ? ["mixer.in_proj.weight", ...names] : names) {
			expect(hybrid[layer(4, name)]).toBe(drawn[layer(4, name)]!);
			expect(hybrid[`optimizer.state.param.${layer(4, name)}`]).toBe(drawn[layer(4, name)]!);
		}
		expect(Object.keys(hybrid).sort()).toEqual(Object.keys(drawn).sort());
		const goesOn = `${flags} --no-load-rng`;
		expect(await resumed(goesOn, "gpt")).toEqual(await resumed(goesOn, "hybrid"));
		using plan = planned("hybrid", "gpt-returned", { ...toMegatron, layerNames: "gpt" });
		expect(plan.warnings).toEqual([expect.stringContaining("no place for the Mamba-2 layers 0, 4 of")]);
		await plan.run(() => {});
		expect(digests("gpt-returned")).toEqual(digests("gpt"));
	}, 30_000);

	test("what does not fit is named", () => {
		const refuse = (source: string, change: Change, sentence: string) =>
			expect(() => planned(source, "x", change)).toThrow(sentence);
		const gpt = { ...toMegatron, layerNames: "gpt" } as const;
		refuse("flat", gpt, 'pattern "ME*-*E/*E" is of no GPT model: it has 2 * and 3 - or E');
		refuse(
			"gpt",
			{ ...toNative, pattern: "*E*E*E" },
			'is a GPT model of 2 layers, and pattern "*E*E*E" has 3 * of them',
		);
		refuse("gpt", { ...toNative, pattern: "*-*E" }, 'has experts in layer 0, and pattern "*-*E" names it -.');
		const sizes = { mamba_num_heads: 3, mamba_num_groups: 2 };
		const newLayers = { seed: 1, sizes };
		refuse("gpt", { ...toNative, pattern: "M*E*E", newLayers }, "no Mamba-2 layer has mamba-num-heads 3");
	});
});

test("a folder of torch_dist checkpoints is read and not written into", async () => {
	const flags = `${predicting} --train-iters 4 --load ${at("mtp-megatron")}`;
	const refuse = async (more: string, sentence: string) =>
		await expect(trained(device, `${flags} ${more}`, at("refused.jsonl"))).rejects.toThrow(sentence);
	await refuse(`--save ${at("mtp-megatron")} --save-over`, "holds a torch_dist checkpoint, and this run's are native");
	await refuse("--ckpt-step 7", "mtp-megatron has no checkpoint of step 7.");
	await refuse("--hybrid-layer-pattern ME*-/*E", 'has the layers "ME*-/*E/*E", and the pattern given has "ME*-/*E"');
	await refuse("--num-experts 8", "holds another model: --num-experts is 4 there and 8 here");
	await refuse("--seed 5", "was trained with seed 1234, this run has 5");
	const weights = `--finetune --save ${at("from-megatron")}`;
	const steps = await trained(device, `${flags} ${weights} --ckpt-step 2`, at("weights-alone.jsonl"));
	expect(Object.keys(steps)).toEqual(["1", "2", "3", "4"]);
	// Its own checkpoints go back under the names that it came with.
	await convert("from-megatron", "from-megatron-again", toMegatron);
	expect(Object.keys(digests("from-megatron-again")).sort()).toEqual(Object.keys(digests("mtp-megatron")).sort());
});
