/** Families that come back from hybrid and GPT models of torch_dist, under the names that Megatron-Bridge gives them. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { configurationFromHuggingFace } from "../../../src/checkpoint/hf/families/index.ts";
import { openSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
import { golden } from "../../golden.ts";
import { conversionOptions } from "../conversion/options.ts";

const scratch = mkdtempSync(join(tmpdir(), "mimo-megatron-names-"));
afterAll(() => rmSync(scratch, { recursive: true }));

const configOf = (name: string) => JSON.parse(readFileSync(join(golden(name), "config.json"), "utf8"));
const read = (json: Readonly<Record<string, unknown>>) => configurationFromHuggingFace(json, "config.json");

test("DeepSeek-V3 comes back from a hybrid and from a GPT model with Megatron's names", async () => {
	const source = golden("deepseek-v3-mtp");
	for (const [names, layer, mtp] of [
		["physical", 0, "layers.0"],
		["gpt", 1, ""],
	] as const) {
		const [megatron, back] = ["to", "from"].map((way) => join(scratch, `deepseek-${names}-${way}`)) as [string, string];
		const there = { from: "hf", to: "torch_dist", source, target: megatron, layerNames: names } as const;
		const here = { from: "torch_dist", to: "hf", source: megatron, target: back } as const;
		for (const way of [{ ...there, pattern: "[+-][+E]/+E" }, here]) {
			using plan = planConversion(conversionOptions({ ...way, optimizer: false }));
			await plan.run(() => {});
		}
		const metadata = readFileSync(join(megatron, "release/.metadata"), "latin1");
		for (const module of [
			"q_down_proj.weight",
			"q_up_proj.layer_norm_weight",
			"kv_down_proj.weight",
			"kv_up_proj.weight",
		]) {
			expect(metadata).toContain(`decoder.layers.${layer}.self_attention.linear_${module}`);
			expect(metadata).toContain(`mtp_model_layer.${mtp === "" ? "" : `${mtp}.`}self_attention.linear_${module}`);
		}
		for (const file of ["model.safetensors"]) {
			expect(readFileSync(join(back, file)).equals(readFileSync(join(source, file)))).toBeTrue();
		}
		expect(read(JSON.parse(readFileSync(join(back, "config.json"), "utf8")))).toEqual(
			read(configOf("deepseek-v3-mtp")),
		);
	}
});

test.each([
	["qwen3-next", "[GE][*E][G-]"],
	["qwen3-next-mtp", null],
	["qwen35-moe", "[GE][*E]"],
] as const)("%s comes back from a hybrid and from a GPT model with Megatron-Bridge's names", async (name, pattern) => {
	using source = openSafetensors(join(golden(name), "model.safetensors"));
	for (const layerNames of ["physical", "gpt"] as const) {
		if (layerNames === "gpt" && pattern === null) continue;
		const [megatron, back] = ["to", "from"].map((way) => join(scratch, `${name}-${layerNames}-${way}`)) as [
			string,
			string,
		];
		const there = { from: "hf", to: "torch_dist", source: golden(name), target: megatron, layerNames } as const;
		// The tensors of Qwen3.5 and of Qwen3-Next are the same in Megatron.
		const here = { from: "torch_dist", to: "hf", source: megatron, target: back, reference: golden(name) } as const;
		for (const way of [{ ...there, pattern }, here]) {
			using plan = planConversion(conversionOptions({ ...way, optimizer: false }));
			await plan.run(() => {});
		}
		using stored = TorchDistFolder.open(megatron);
		const layer = "decoder.layers.0.self_attention.";
		const found = [...stored.tensors.keys()].flatMap((key) => key.split(layer)[1] ?? []);
		expect(found.sort()).toEqual([
			...["A_log", ...["key", "query", "value"].map((part) => `conv1d.weight.${part}`), "dt_bias"],
			...[
				"in_proj.layer_norm_weight",
				...["alpha", "beta", "key", "query", "value", "z"].map((part) => `in_proj.weight.${part}`),
			],
			...["out_norm.weight", "out_proj.weight"],
		]);
		const key = [...stored.tensors.keys()].find((one) => one.endsWith(`${layer}out_norm.weight`))!;
		const gain = source.read("model.layers.0.linear_attn.norm.weight") as Float32Array;
		expect(readTensor(stored, key)).toEqual(gain.map((value) => value - 1));
		using returned = openSafetensors(join(back, "model.safetensors"));
		expect([...returned.tensors.keys()].sort()).toEqual([...source.tensors.keys()].sort());
		for (const tensor of source.tensors.keys()) {
			expect([tensor, Bun.deepEquals(returned.read(tensor), source.read(tensor))]).toEqual([tensor, true]);
		}
		expect(read(JSON.parse(readFileSync(join(back, "config.json"), "utf8")))).toEqual(read(configOf(name)));
	}
});

test("Gemma 3 comes back from a GPT model with Megatron-Bridge's names", async () => {
	const [megatron, back] = [join(scratch, "gemma-megatron"), join(scratch, "gemma-back")];
	const there = {
		from: "hf",
		to: "torch_dist",
		source: golden("gemma3"),
		target: megatron,
		layerNames: "gpt",
	} as const;
	const here = { from: "torch_dist", to: "hf", source: megatron, target: back } as const;
	for (const way of [{ ...there, pattern: "[*-][*-][*-]" }, here]) {
		using plan = planConversion(conversionOptions({ ...way, optimizer: false }));
		await plan.run(() => {});
	}
	const metadata = readFileSync(join(megatron, "release/.metadata"), "latin1");
	for (const module of ["self_attention.linear_proj", "mlp.linear_fc2"]) {
		expect(metadata).toContain(`decoder.layers.${module}.post_layernorm.weight`);
	}
	const file = "model.safetensors";
	expect(readFileSync(join(back, file)).equals(readFileSync(join(golden("gemma3"), file)))).toBeTrue();
	expect(read(JSON.parse(readFileSync(join(back, "config.json"), "utf8")))).toEqual(read(configOf("gemma3")));
});
