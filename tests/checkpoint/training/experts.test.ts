/** Gated experts with biases in checkpoints: halves and blocks in turns, one by one and grouped, through every format. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { planConversion } from "../../../src/checkpoint/conversion/convert.ts";
import { inspectCheckpoint } from "../../../src/checkpoint/conversion/inspect.ts";
import { canonicalLayout } from "../../../src/checkpoint/native/manifest.ts";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { readCommon } from "../../../src/checkpoint/torch-dist/common.ts";
import { TorchDistFolder } from "../../../src/checkpoint/torch-dist/folder.ts";
import type { Device } from "../../../src/native/device.ts";
import { testDevice } from "../../support.ts";
import { conversionOptions } from "../conversion/options.ts";
import { trained } from "./in-process.ts";

let device: Device;
let folder: string;
beforeAll(async () => {
	device = await testDevice();
	folder = mkdtempSync(join(tmpdir(), "mimo-experts-"));
	await trained(device, `${gated} --bf16 --train-iters 2 --save ${at("halves")}`, at("halves.jsonl"));
});
afterAll(() => {
	device[Symbol.dispose]();
	rmSync(folder, { recursive: true });
});
const at = (name: string) => join(folder, name);

const gated =
	"--hybrid-layer-pattern ME*- --no-squared-relu --swiglu --add-bias-linear --moe-shared-expert-intermediate-size 0 --activation-func-clamp-value 2";
const inTurns = "--moe-mlp-glu-interleave-size 8";

const words = (...flags: readonly string[]) => flags.filter((flag) => flag !== "").join(" ");

type Change = Omit<Parameters<typeof conversionOptions>[0], "source" | "target">;

async function convert(source: string, target: string, change: Change): Promise<readonly string[]> {
	using plan = planConversion(conversionOptions({ source: at(source), target: at(target), ...change }));
	await plan.run(() => {});
	return [...plan.tensors.tensors.keys()];
}

/** Shape and SHA-256 of every stored tensor, the optimizer's too. */
function digests(name: string): Record<string, string> {
	const { tensors } = inspectCheckpoint(at(name), { checksums: true, allowFallback: false });
	return Object.fromEntries(tensors.map(({ name, shape, dtype, sha256 }) => [name, `${shape} ${dtype} ${sha256}`]));
}

/** Steps 3 and 4. */
const resumed = (flags: string, from: string) =>
	trained(device, words(gated, "--bf16", flags, `--train-iters 4 --load ${at(from)}`), at(`${from}.resumed.jsonl`));

const close = (a: Record<number, object>, b: Record<number, object>) => {
	for (const [step, values] of Object.entries(a)) {
		for (const [name, value] of Object.entries(values)) {
			expect((b[Number(step)] as Record<string, number>)[name]).toBeCloseTo(value as number, 2);
		}
	}
	expect(Object.keys(b)).toEqual(Object.keys(a));
};

describe("interleaved rows are only in a run's memory", () => {
	test("a checkpoint with halves passes through a run with interleaved rows, byte for byte", async () => {
		// No step is left: what was read is written.
		const copy = (flags: string, from: string, to: string) =>
			trained(
				device,
				words(gated, "--bf16", flags, `--train-iters 2 --load ${at(from)} --save ${at(to)}`),
				at(`${to}.jsonl`),
			);
		await copy(inTurns, "halves", "turns");
		expect(digests("turns")).toEqual(digests("halves"));
		await copy("", "turns", "again");
		expect(digests("again")).toEqual(digests("halves"));
	}, 30_000);

	test("a run with interleaved rows resumes bit for bit, and continues with halves within rounding", async () => {
		const whole = await trained(device, `${gated} --bf16 ${inTurns} --train-iters 4`, at("whole.jsonl"));
		await trained(device, `${gated} --bf16 ${inTurns} --train-iters 2 --save ${at("first")}`, at("first.jsonl"));
		const { 3: third, 4: fourth } = whole;
		const same = await resumed(inTurns, "first");
		expect(same).toEqual({ 3: third!, 4: fourth! });
		close(same, await resumed("", "first"));
		// Few chunks, though a gated weight lies in memory in turns of eight rows.
		using stored = NativeCheckpoint.open(at("first"), { allowFallback: false });
		const { chunks } = stored.manifest.tensors["language_model.decoder.layers.1.mlp.experts.linear_fc1.weight0"]!;
		expect(chunks.length).toBe(1);
	}, 60_000);
});

describe("conversions", () => {
	test("torch_dist and back: biases, optimizer and arguments", async () => {
		const names = await convert("halves", "megatron", { from: "native", to: "torch_dist" });
		for (const name of [
			"decoder.layers.1.mlp.experts.experts.linear_fc1.bias",
			"decoder.layers.1.mlp.experts.experts.linear_fc2.bias",
			"decoder.layers.1.mlp.router.bias",
			"decoder.layers.2.self_attention.linear_qkv.bias",
			"decoder.layers.3.mlp.linear_fc2.bias",
			"optimizer.state.exp_avg_sq.decoder.layers.1.mlp.experts.experts.linear_fc1.bias",
		]) {
			expect(names).toContain(name);
		}
		using stored = TorchDistFolder.open(at("megatron"));
		expect(readCommon(stored, []).args).toMatchObject({
			...{ swiglu: true, squared_relu: false, add_bias_linear: true, activation_func_clamp_value: 2 },
		});
		await convert("megatron", "back", { from: "torch_dist", to: "native" });
		expect(digests("back")).toEqual(digests("halves"));
		const direct = await resumed("", "halves");
		expect(await resumed("", "megatron")).toEqual(direct);
		expect(await resumed("", "back")).toEqual(direct);
	}, 60_000);

	test("torch_dist with interleaved rows, as Megatron's arguments say", async () => {
		// A checkpoint that came from Megatron keeps its arguments.
		cpSync(join(at("back"), "iter_0000002"), at("edited"), { recursive: true });
		const index = JSON.parse(readFileSync(join(at("edited"), "index.json"), "utf8"));
		index.common.megatron.args.moe_mlp_glu_interleave_size = 8;
		writeFileSync(join(at("edited"), "index.json"), JSON.stringify(index));
		await convert("edited", "megatron-turns", { from: "native", to: "torch_dist" });
		const fc1 = "decoder.layers.1.mlp.experts.experts.linear_fc1";
		const [turns, halves] = [digests("megatron-turns"), digests("megatron")];
		for (const name of [`${fc1}.weight`, `optimizer.state.exp_avg.${fc1}.bias`]) {
			expect(turns[name]).toBeDefined();
			expect(turns[name]).not.toEqual(halves[name]);
		}
		await convert("megatron-turns", "turns-back", { from: "torch_dist", to: "native" });
		expect(digests("turns-back")).toEqual(digests("halves"));
		expect(await resumed("", "megatron-turns")).toEqual(await resumed("", "halves"));
	}, 60_000);

	for (const [experts, glu] of [
		["grouped", 0],
		["indexed", 8],
		["grouped", 4],
	] as const) {
		test(`native, ${experts}, ${glu > 0 ? `in turns of ${glu} rows` : "halves"}, and back`, async () => {
			const name = `${experts}-${glu}`;
			const layout = { ...canonicalLayout, experts, glu: { experts: glu, sharedExperts: 0 } };
			const names = await convert("halves", name, { from: "native", to: "native", layout });
			const fc1 = "language_model.decoder.layers.1.mlp.experts.linear_fc1";
			for (const what of [`${fc1}.weight`, `${fc1}.bias`, `optimizer.state.exp_avg.${fc1}.bias`]) {
				expect(names.includes(what)).toBe(experts === "grouped");
				expect(names.includes(`${what}3`)).toBe(experts === "indexed");
			}
			const [stored, halves] = [digests(name), digests("halves")];
			if (experts === "indexed") expect(stored[`${fc1}.weight0`]).not.toEqual(halves[`${fc1}.weight0`]);
			await convert(name, `${name}-back`, { from: "native", to: "native" });
			expect(digests(`${name}-back`)).toEqual(halves);
			expect(await resumed(inTurns, name)).toEqual(await resumed(inTurns, "halves"));
		}, 60_000);
	}

	test("Hugging Face's NemotronH has neither gates nor biases", async () => {
		await expect(convert("halves", "hf", { from: "native", to: "hf" })).rejects.toThrow(/swiglu|add-bias-linear/);
	});
});
