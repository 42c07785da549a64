/** Adapters of the peft package: read, merged, trained as it trains them, written again. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { spellings } from "../../../src/checkpoint/hf/families/nemotron-h-names.ts";
import { openHuggingFaceModel } from "../../../src/checkpoint/hf/parts.ts";
import { adaptersOf, MergedStore, withoutAdapters } from "../../../src/checkpoint/lora/adapters.ts";
import { openPeftFolder, planPeftFolder } from "../../../src/checkpoint/lora/peft-folder.ts";
import { peftCorrespondence, peftSpelling, weightsOf } from "../../../src/checkpoint/lora/peft-names.ts";
import { loadModel, ValueStore } from "../../../src/checkpoint/model-store.ts";
import { openSafetensors, writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { joinStores, readTensor } from "../../../src/checkpoint/store.ts";
import { nextTokenMicrobatch, withoutImages } from "../../../src/data/microbatch.ts";
import type { HybridConfig } from "../../../src/models/language/config.ts";
import type { Device } from "../../../src/native/device.ts";
import { languageAlone, topologyOfLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { huggingFaceConfig } from "../../../src/parity/language/parity.ts";
import { assemble, type Run } from "../../../src/train/assemble.ts";
import { Losses } from "../../../src/train/losses.ts";
import { trainStep } from "../../../src/train/step.ts";
import { golden } from "../../golden.ts";
import { relativeRms, testDevice } from "../../support.ts";

const base = golden("hybrid-tiny");
const reference = golden("lora-peft");
const expected = JSON.parse(readFileSync(join(reference, "expected.json"), "utf8"));
const folder = mkdtempSync(join(tmpdir(), "mimo-peft-"));
let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => {
	device[Symbol.dispose]();
	rmSync(folder, { recursive: true });
});

const lora: NonNullable<HybridConfig["lora"]> = {
	...{ rank: 2, alpha: 6, dropout: 0, start: "zero" },
	targets: ["linear_proj", "in_proj", "linear_fc1", "linear_fc2"],
};

/** The base, and `adapters` where the configuration has any. */
async function open(adapters: string | null): Promise<Run> {
	using source = openHuggingFaceModel(base);
	const { lr: _, weight_decay: __, betas, eps } = expected.optimizer;
	const language = huggingFaceConfig(source, join(base, "config.json"), "f32");
	const run = await assemble(
		{
			...{ encoders: [], clipGrad: 0, seed: 1 },
			language: { ...language, lora: adapters === null ? null : lora },
			frozenLanguage: false,
			adam: { beta1: betas[0], beta2: betas[1], epsilon: eps },
		},
		topologyOfLayout(languageAlone),
		World.alone(device),
	);
	run.initialise(1);
	loadModel(withoutAdapters(run.language!), source.weights);
	if (adapters !== null) {
		using stored = openPeftFolder(join(reference, adapters), source.configuration);
		expect(stored).toMatchObject({ settings: { rank: 2, alpha: 6 }, stacked: [] });
		loadModel(adaptersOf(run.language!), stored.weights);
	}
	run.state.optimizer.refreshMasters();
	return run;
}

test("three steps are those of peft and torch", async () => {
	using file = openSafetensors(join(reference, "expected.safetensors"));
	const { shape } = file.information("batches");
	const ids = file.read("batches") as Int32Array;
	const [steps, sequences, length] = shape as [number, number, number];
	using run = await open("first");
	const losses = Array.from({ length: steps }, (_, step) => {
		const rows = Array.from({ length: sequences }, (_, row) => {
			const first = (step * sequences + row) * length;
			return ids.slice(first, first + length);
		});
		const about = { learningRate: expected.optimizer.lr, weightDecay: expected.optimizer.weight_decay };
		const microbatches = [withoutImages(nextTokenMicrobatch(rows))];
		return trainStep(run.state, { microbatches, iteration: step, ...about }).loss;
	});
	expect(relativeRms(losses, expected.losses)).toBeLessThan(1e-6);
	using source = openHuggingFaceModel(base);
	using last = openPeftFolder(join(reference, "last"), source.configuration);
	using first = openPeftFolder(join(reference, "first"), source.configuration);
	using trained = new ValueStore("trained", adaptersOf(run.language!));
	expect([...trained.tensors.keys()].sort()).toEqual([...last.weights.tensors.keys()].sort());
	for (const name of trained.tensors.keys()) {
		const [own, theirs, before] = [trained, last.weights, first.weights].map(
			(store) => readTensor(store, name) as Float32Array,
		) as [Float32Array, Float32Array, Float32Array];
		// Of what the steps changed.
		expect([name, relativeRms(own, theirs) / relativeRms(theirs, before) < 2e-4]).toEqual([name, true]);
	}
	// The base is as it was.
	using values = new ValueStore("base", withoutAdapters(run.language!));
	for (const name of values.tensors.keys()) {
		expect(readTensor(values, name)).toEqual(readTensor(source.weights, name));
	}
});

describe("an A for each of q, k and v", () => {
	test("is merged: logits of the merged model are those of peft", async () => {
		using source = openHuggingFaceModel(base);
		using stored = openPeftFolder(join(reference, "own"), source.configuration);
		expect(stored.stacked).toEqual([
			["q_proj", "k_proj", "v_proj"].map((name) => `model.layers.2.mixer.${name}`).join(", "),
		]);
		using merged = new MergedStore(joinStores("merged", [source.weights, stored.weights]), 6 / 2);
		using run = await open(null);
		loadModel(run.language!, merged);
		using file = openSafetensors(join(reference, "expected.safetensors"));
		const ids = file.read("ids") as Int32Array;
		let logits: Float32Array = new Float32Array(0);
		const { scalars, lossOwner, lossNames } = run.state;
		using losses = new Losses(scalars.device, lossOwner, lossNames);
		run.state.passes.evaluate(
			[withoutImages(nextTokenMicrobatch([Int32Array.of(...ids, 0)]))],
			losses,
			(name, value) => {
				if (name === "logits") logits = value.toFloat32();
			},
		);
		expect(relativeRms(logits, file.read("logits") as Float32Array)).toBeLessThan(2e-6);
	});
});

test("what is written is what was read", async () => {
	using source = openHuggingFaceModel(base);
	using stored = openPeftFolder(join(reference, "last"), source.configuration);
	const options = { spelling: source.spelling, base: "hybrid-tiny", path: folder };
	const planned = planPeftFolder(stored.weights, stored.settings, source.configuration, options);
	expect(planned.warnings).toEqual([]);
	planned.write(folder);
	using theirs = openSafetensors(join(reference, "last/adapter_model.safetensors"));
	using own = openSafetensors(join(folder, "adapter_model.safetensors"));
	expect([...own.tensors.keys()].sort()).toEqual([...theirs.tensors.keys()].sort());
	for (const name of own.tensors.keys()) expect(own.read(name)).toEqual(theirs.read(name));
	const config = (path: string) => JSON.parse(readFileSync(join(path, "adapter_config.json"), "utf8"));
	const { target_modules: targets, ...rest } = config(folder);
	// Python's re.fullmatch.
	const matches = (module: string) => new RegExp(`^(?:${targets})$`).test(module);
	for (const name of own.tensors.keys()) {
		expect(matches(name.replace("base_model.model.", "").replace(/\.lora_[AB]\.weight$/, ""))).toBeTrue();
	}
	expect(["model.layers.1.mixer.experts", "model.layers.1.mixer.gate", "lm_head"].map(matches)).toEqual([
		...[false, false, false],
	]);
	expect(config(join(reference, "last"))).toMatchObject(rest);
});

describe("adapters of MTP depths stand under mtp.layers", () => {
	const wrapped = { base: "language_model.backbone.", head: "language_model.", experts: "separate" } as const;
	for (const spelling of [spellings.published, wrapped, { ...wrapped, mtp: "language_model." }]) {
		test(JSON.stringify(spelling), () => {
			using source = openHuggingFaceModel(base);
			const configuration = { ...source.configuration, hybridLayerPattern: "ME*M-E/*-/*-" };
			const projection = "self_attention.linear_qkv.weight";
			const [main, ahead] = [
				`language_model.decoder.layers.2.${projection}`,
				`language_model.mtp.layers.1.mtp_model_layer.layers.0.${projection}`,
			];
			const { builder, modules } = peftCorrespondence([ahead, main], 2, configuration, spelling, "p");
			const mtp = "mtp" in spelling ? spelling.mtp : "";
			expect(modules).toContain(`${mtp}mtp.layers.2.mixer.q_proj`);
			const found = peftSpelling(builder.foreign.keys());
			expect(found).toEqual(spelling);
			expect(weightsOf(new Set(modules), configuration, found!, "p")).toEqual([main, ahead]);
		});
	}
});

test.each([
	["qwen3-next", "llama", ["in_proj_qkvz", "in_proj_ba"]],
	["qwen35-moe", "qwen3_5_text", ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]],
] as const)("adapters of Gated DeltaNet and gated attention: %s", (name, family, projections) => {
	using source = openHuggingFaceModel(golden(name));
	const { configuration, spelling } = source;
	const [linear, full] = ["layers.0.self_attention.in_proj", "layers.2.self_attention.linear_qkv"].map(
		(module) => `language_model.decoder.${module}.weight`,
	) as [string, string];
	const { builder, modules } = peftCorrespondence([linear, full], 2, configuration, spelling, "p");
	expect(modules).toEqual([
		...projections.map((projection) => `model.layers.0.linear_attn.${projection}`),
		...["q", "k", "v"].map((part) => `model.layers.1.self_attn.${part}_proj`),
	]);
	// Every row of B is a row of one module's B.
	const heights = [linear, full].map((weight) => source.weights.tensors.get(weight)!.shape[0]!);
	const rows = builder.links.filter(({ foreign }) => foreign.includes("lora_B"));
	expect(rows.reduce((sum, { count }) => sum + count, 0)).toBe(heights[0]! + heights[1]!);
	const found = peftSpelling(builder.foreign.keys());
	expect(found).toEqual({ ...spelling, family });
	expect(weightsOf(new Set(modules), configuration, found!, "p")).toEqual([linear, full]);
});

test("adapters of queries and values alone, peft's default for Llama and Qwen, leave the keys as they are", () => {
	using source = openHuggingFaceModel(golden("qwen3"));
	const {
		hiddenSize: width,
		kvChannels: headDim,
		numAttentionHeads: heads,
		numQueryGroups: groups,
	} = source.configuration;
	const path = mkdtempSync(join(folder, "default-"));
	const config = { peft_type: "LORA", r: 2, lora_alpha: 2, target_modules: ["q_proj", "v_proj"] };
	writeFileSync(join(path, "adapter_config.json"), JSON.stringify(config));
	const matrix = (name: string, shape: number[], value: number) => ({
		name: `base_model.model.model.layers.0.self_attn.${name}.weight`,
		...{ dtype: "F32" as const, shape },
		data: () => new Float32Array(shape[0]! * shape[1]!).fill(value),
	});
	const rows = { q_proj: heads * headDim, v_proj: groups * headDim };
	writeSafetensors(
		join(path, "adapter_model.safetensors"),
		Object.entries(rows).flatMap(([name, height], i) => [
			matrix(`${name}.lora_A`, [2, width], 1),
			matrix(`${name}.lora_B`, [height, 2], i + 1),
		]),
	);
	using adapters = openPeftFolder(path, source.configuration);
	expect(adapters.stacked).toHaveLength(1);
	const merged = new MergedStore(joinStores("both", [source.weights, adapters.weights]), 1);
	const weight = "language_model.decoder.layers.0.self_attention.linear_qkv.weight";
	const [before, after] = [source.weights, merged].map((store) => readTensor(store, weight) as Float32Array);
	const changes = Array.from({ length: before!.length / width }, (_, row) =>
		Math.round(after![row * width]! - before![row * width]!),
	);
	const count = (change: number) => changes.filter((one) => one === change).length;
	expect([count(2), count(4), count(0)]).toEqual([rows.q_proj, rows.v_proj, rows.v_proj]);
	writeFileSync(join(path, "adapter_config.json"), JSON.stringify({ ...config, target_modules: ["k_proj", "q_proj"] }));
	expect(() => openPeftFolder(path, source.configuration)).toThrow("2 missing");
});

describe("refuses by name", () => {
	/** Why a changed copy of last/ is refused. */
	function refusal(change: { config?: Record<string, unknown>; rename?: (name: string) => string | null }): string {
		const path = mkdtempSync(join(folder, "changed-"));
		cpSync(join(reference, "last"), path, { recursive: true });
		const file = join(path, "adapter_config.json");
		const config = JSON.parse(readFileSync(file, "utf8"));
		writeFileSync(file, JSON.stringify({ ...config, ...change.config }));
		if (change.rename) {
			using values = openSafetensors(join(reference, "last/adapter_model.safetensors"));
			const entries = [...values.tensors].flatMap(([name, { dtype, shape }]) => {
				const other = change.rename!(name);
				return other === null ? [] : [{ name: other, dtype, shape, data: () => values.read(name) }];
			});
			writeSafetensors(join(path, "adapter_model.safetensors"), entries);
		}
		using source = openHuggingFaceModel(base);
		try {
			openPeftFolder(path, source.configuration)[Symbol.dispose]();
		} catch (error) {
			return (error as Error).message.replaceAll(path, "PATH");
		}
		return "nothing";
	}

	for (const [config, sentence] of [
		[{ peft_type: "LOHA" }, 'peft_type is "LOHA"'],
		[{ use_rslora: true }, "use_rslora is true"],
		[{ use_dora: true }, "use_dora is true"],
		[{ bias: "all" }, 'bias is "all"'],
		[{ modules_to_save: ["lm_head"] }, 'modules_to_save is ["lm_head"]'],
		[{ rank_pattern: { in_proj: 4 } }, 'rank_pattern is {"in_proj":4}'],
		[{ init_lora_weights: "pissa_niter_4" }, 'init_lora_weights is "pissa_niter_4"'],
		[{ r: 0 }, "r is 0"],
	] as const) {
		test(JSON.stringify(config), () => {
			expect(refusal({ config })).toBe(`PATH/adapter_config.json: ${sentence}, which no adapter of this program has.`);
		});
	}

	test("another rank than the tensors have", () => {
		expect(refusal({ config: { r: 3 } })).toMatch(
			/^The tensors of PATH\/adapter_model\.safetensors do not match the model; 18 of another shape: .* has \[2, 64\], expected \[3, 64\]/,
		);
	});

	test("a matrix that is missing, and one of no module", () => {
		expect(refusal({ rename: (name) => (name.includes("layers.2.mixer.o_proj.lora_B") ? null : name) })).toMatch(
			/1 missing: base_model\.model\.model\.layers\.2\.mixer\.o_proj\.lora_B\.weight\.$/,
		);
		expect(refusal({ rename: (name) => name.replace("o_proj.lora_B", "gate.lora_B") })).toMatch(
			/1 unexpected: base_model\.model\.model\.layers\.2\.mixer\.gate\.lora_B\.weight\.$/,
		);
	});

	test("adapters of another model", () => {
		expect(refusal({ rename: (name) => name.replace(".mixer.", ".attn.") })).toMatch(
			/holds no adapters of a language model/,
		);
	});
});
