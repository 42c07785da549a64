/** Layers with sizes of their own: in the configuration, in counts, in names and in Hugging Face's config.json. */

import { describe, expect, test } from "bun:test";
import {
	configurationFromHuggingFace,
	configurationToHuggingFace,
	languageCorrespondence,
} from "../../../src/checkpoint/hf/families/index.ts";
import { spellings } from "../../../src/checkpoint/hf/families/nemotron-h-names.ts";
import { formatPythonJson, parsePythonJson } from "../../../src/checkpoint/hf/json.ts";
import { modelOfLayer } from "../../../src/config/per-layer.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { modelDifferences } from "../../../src/config/same-model.ts";
import { countFlopsPerToken, countParameters, megatronFlopsPerStep } from "../../../src/models/language/counts.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { hybridParameters } from "../../../src/models/language/names.ts";

const base = { preset: "nemotron-tiny", "hybrid-layer-pattern": "MEM*E" } as const;
const lists = {
	"mamba-num-heads-per-layer": [8, 4],
	"num-attention-heads-per-layer": [2],
	"num-experts-per-layer": [4, 6],
	"moe-ffn-hidden-size-per-layer": [96, 64],
} as const;
const mixed = configurationOf({ ...base, ...lists });

describe("counts", () => {
	/** A model of one layer kind alone, with the sizes of one layer. */
	const alone = (symbol: string, sizes: Readonly<Record<string, unknown>>) =>
		configurationOf({ ...base, "hybrid-layer-pattern": symbol, ...sizes });
	const parts = [
		alone("M", { "mamba-num-heads": 8 }),
		alone("E", { "num-experts": 4, "moe-ffn-hidden-size": 96 }),
		alone("M", { "mamba-num-heads": 4 }),
		alone("*", { "num-attention-heads": 2 }),
		alone("E", { "num-experts": 6, "moe-ffn-hidden-size": 64 }),
	];

	test("parameters and operations are the sums of its layers'", () => {
		const whole = countParameters(mixed);
		const outside = (c: typeof mixed) => countParameters(c).embedding + countParameters(c).output + c.hiddenSize;
		const layers = parts.reduce((sum, part) => sum + countParameters(part).total - outside(part), 0);
		expect(whole.total).toBe(layers + outside(mixed));
		const active = parts.reduce((sum, part) => sum + countParameters(part).active - part.hiddenSize, 0);
		expect(whole.active).toBe(active + mixed.hiddenSize);
		const flops = countFlopsPerToken(mixed);
		expect(flops.layers).toEqual(parts.map((part) => countFlopsPerToken(part).layers[0]!));
		expect(flops.forward).toBe(flops.layers.reduce((sum, layer) => sum + layer, flops.logits));
		const logits = (c: typeof mixed) => 3 * 2 * c.globalBatchSize * c.seqLength * c.hiddenSize * 256;
		const megatron = parts.reduce((sum, part) => sum + megatronFlopsPerStep(part) - logits(part), logits(mixed));
		expect(megatronFlopsPerStep(mixed)).toBeCloseTo(megatron, -2);
	});

	test("a list of equal sizes is the size of all, wherever models are compared", () => {
		const equal = configurationOf({ ...base, "mamba-num-heads-per-layer": [8, 8] });
		const plain = configurationOf(base);
		expect(modelDifferences({ ...equal }, { ...plain })).toEqual([]);
		expect(countParameters(equal)).toEqual(countParameters(plain));
		expect(modelDifferences({ ...mixed }, { ...configurationOf({ ...base, ...lists, "mamba-num-heads": 6 }) })).toEqual(
			[],
		);
		expect(modelDifferences({ ...mixed }, { ...plain, numAttentionHeadsPerLayer: [2] })).toEqual([
			"--mamba-num-heads-per-layer is 8,4 there and unset here",
			"--num-experts-per-layer is 4,6 there and unset here",
			"--moe-ffn-hidden-size-per-layer is 96,64 there and unset here",
		]);
	});
});

test("layers of MTP depths have the sizes of all", () => {
	const ahead = configurationOf({ ...base, ...lists, "hybrid-layer-pattern": "MEM*E/ME" });
	const shapes = new Map(
		hybridParameters(hybridConfig(ahead)).map(({ name, shape, experts }) => [name, [experts ?? 1, ...shape]]),
	);
	const h = ahead.hiddenSize;
	expect(shapes.get("language_model.decoder.layers.4.mlp.experts.linear_fc1.weight")).toEqual([6, 64, h]);
	expect(shapes.get("language_model.mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.linear_fc1.weight")).toEqual([
		8,
		128,
		h,
	]);
	expect(shapes.get("language_model.decoder.layers.2.mixer.A_log")).toEqual([1, 4]);
	expect(shapes.get("language_model.mtp.layers.0.mtp_model_layer.layers.0.mixer.A_log")).toEqual([1, 8]);
	expect(modelOfLayer(ahead, 5)).toBe(ahead);
});

describe("what does not fit is refused in one sentence", () => {
	test.each<[Readonly<Record<string, unknown>>, string]>([
		[
			{ "mamba-num-heads-per-layer": [8] },
			"the value is [8]; allowed is a number for each of the 2 M of hybrid-layer-pattern's main part, and these are 1.",
		],
		[
			{ "mamba-num-heads-per-layer": [8, 5] },
			"the value is [8,5]; allowed are multiples of mamba-num-groups (2), not 5.",
		],
		[
			{ "num-attention-heads-per-layer": [3] },
			"the value is [3]; allowed are multiples of num-query-groups (2), not 3.",
		],
		[
			{ "num-experts-per-layer": [4, 1] },
			"the value is [4,1]; allowed is at least 2, which moe-router-topk asks for, not 1.",
		],
		[
			{ "num-experts-per-layer": [4, 5], "llm-tp": 2, "llm-ep": 2 },
			"the value is [4,5]; allowed are multiples of llm-ep (2), not 5.",
		],
		[
			{ "moe-router-load-balancing-type": ["pooled_aux_loss"], "num-experts-per-layer": [4, 6] },
			`the value is ["pooled_aux_loss"]; allowed with num-experts-per-layer are losses of single layers`,
		],
		[
			{ "moe-ffn-hidden-size-per-layer": [96, 65], "llm-tp": 2, "llm-expt-tp": 2 },
			"the value is [96,65]; allowed are multiples of llm-expt-tp (2), not 65.",
		],
	])("%j", (given, sentence) => {
		expect(() => configurationOf({ ...base, ...given })).toThrow(`${Object.keys(given)[0]} (program): ${sentence}`);
	});
});

describe("config.json", () => {
	const json = configurationToHuggingFace(mixed, "float32", "small");
	const text = () => parsePythonJson(formatPythonJson(json), "config.json");
	type Blocks = { subblock_configs: Record<string, unknown>[] }[];

	test("has Model-Optimizer's block_configs, and reads as the same model", () => {
		expect((json.block_configs as Blocks).map(({ subblock_configs: [block] }) => block)).toEqual([
			{ kind: "mamba", name: "mamba", no_op: false, num_heads: 8 },
			{ kind: "moe", name: "moe", no_op: false, num_experts: 4, expert_intermediate_size: 96 },
			{ kind: "mamba", name: "mamba", no_op: false, num_heads: 4 },
			{ kind: "attention", name: "attention", no_op: false, num_query_heads: 2 },
			{ kind: "moe", name: "moe", no_op: false, num_experts: 6, expert_intermediate_size: 64 },
		]);
		const read = configurationFromHuggingFace(text(), "config.json");
		expect(modelDifferences({ ...read }, { ...mixed })).toEqual([]);
		const shapes = new Map(hybridParameters(hybridConfig(mixed)).map(({ name, shape }) => [name, shape]));
		for (const [name, shape] of languageCorrespondence(read, spellings.published, "small").logical) {
			const spec = shapes.get(name) ?? shapes.get(name.replace(/\d+$/, ""));
			if (spec) expect([name, ...shape.slice(1)]).toEqual([name, ...spec.slice(1)]);
		}
		expect("block_configs" in configurationToHuggingFace(configurationOf(base), "float32", "plain")).toBe(false);
	});

	test.each<[string, (blocks: Blocks) => unknown, string]>([
		["too few", (blocks) => blocks.slice(1), "block_configs is not a list with one entry for each of the 5 layers"],
		[
			"of another kind",
			(blocks) => [blocks[1], ...blocks.slice(1)],
			'block_configs[0] is of kind "moe", its layer is one of mamba',
		],
		[
			"with a size that all layers share here",
			(blocks) => [{ subblock_configs: [{ ...blocks[0]!.subblock_configs[0], state_dim: 7 }] }, ...blocks.slice(1)],
			`block_configs[0]: state_dim is 7, this program's layers have all ${mixed.mambaStateDim}`,
		],
		[
			"that does nothing",
			(blocks) => [{ subblock_configs: [{ kind: "mamba", no_op: true }] }, ...blocks.slice(1)],
			"block_configs[0] is a no_op, and this program's layers all compute; leave it out of the pattern",
		],
		[
			"with no number",
			(blocks) => [{ subblock_configs: [{ kind: "mamba", num_heads: "8" }] }, ...blocks.slice(1)],
			'block_configs[0]: num_heads is "8", expected a whole number',
		],
	])("an entry %s is refused", (_, change, sentence) => {
		const changed = { ...text(), block_configs: change(structuredClone(text().block_configs) as Blocks) };
		expect(() => configurationFromHuggingFace(changed, "config.json")).toThrow(`config.json: ${sentence}.`);
	});
});
