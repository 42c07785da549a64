import { expect, test } from "bun:test";
import type { ModelPart } from "../../src/config/field.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { modelDifferences, modelMakingKeys, modelPartOf, requireSameModel } from "../../src/config/same-model.ts";
import { fieldOf, type Key, keys, propertyOf, subjects } from "../../src/config/schema.ts";

/** A model that has a part. */
function modelWith(part: ModelPart): Record<string, unknown> {
	const base = { preset: "nemotron-vlm-tiny", "hybrid-layer-pattern": "M*-E" };
	const further: Partial<Record<ModelPart, Record<string, unknown>>> = {
		"rotary embedding": { "position-embedding-type": "rope" },
		YaRN: { "position-embedding-type": "yarn" },
		"latent attention": { "hybrid-layer-pattern": "M+-E", "num-query-groups": 4 },
		"learned positions": { "position-embedding-type": "learned_absolute" },
		"softmax router": { "moe-router-score-function": "softmax", "moe-router-enable-expert-bias": false },
		"Gated DeltaNet": { "hybrid-layer-pattern": "G*-E" },
		adapters: { "lora-rank": 4 },
		router: { flextron: true, "enable-router": true, "moe-router-bias-update-rate": 0 },
		"MLP projector": { "vision-projection-type": "mlp" },
	};
	return { ...configurationOf({ ...base, ...further[part] }) };
}

/** Another value of the key's type. */
function otherThan(value: unknown): unknown {
	if (typeof value === "number") return value + 1;
	return typeof value === "boolean" ? !value : `${value} of another kind`;
}

// Whether there is a router: see below.
test.each(modelMakingKeys.filter((key) => key !== "flextron"))("another %s is another model", (key) => {
	const here = modelWith(modelPartOf(key)!);
	const property = propertyOf(key);
	const there = { ...here, [property]: otherThan(here[property]) };
	expect(modelDifferences(here, here)).toEqual([]);
	expect(modelDifferences(there, here)).toEqual([
		`--${key} is ${there[property]} there and ${here[property] ?? "unset"} here`,
	]);
});

test("windows of the same layers are the same model, however their layers are said", () => {
	const windowed = (change: Record<string, unknown>) => ({
		...configurationOf({
			preset: "nemotron-vlm-tiny",
			"hybrid-layer-pattern": "*-*-",
			"window-size": [7, 0],
			...change,
		}),
	});
	const every = windowed({ "window-attn-skip-freq": [2] });
	expect(modelDifferences(every, windowed({}))).toEqual([]);
	expect(modelDifferences(windowed({ "window-attn-skip-freq": [1, 1, 0, 0] }), every)).toEqual([
		"--window-attn-skip-freq is 1,0,0,0 there and unset here",
	]);
	const third = windowed({ "window-attn-skip-freq": [3] });
	expect(modelDifferences(windowed({ "window-attn-skip-freq": [1, 1, 0, 0] }), third)).toEqual([]);
	expect(modelDifferences(windowed({ "window-size": null, "window-attn-skip-freq": null }), every)).toHaveLength(1);
});

test("every key of the model's groups is compared unless it says that it makes no model", () => {
	const names = [
		...(["Language model", "Multi-latent attention", "Mamba-2 layers", "Gated DeltaNet layers"] as const),
		...(["Mixture of experts", "Vision"] as const),
	];
	const groups = names.flatMap((name) => Object.keys(subjects[name]) as Key[]);
	const silent = groups.filter((key) => fieldOf(key).model === undefined && modelPartOf(key) === null);
	expect(silent.every((key) => fieldOf(key).alwaysOn || fieldOf(key).noEffect !== undefined)).toBe(true);
	const elsewhere = keys.filter((key) => !groups.includes(key) && modelPartOf(key) !== null);
	const ofRouter = Object.keys(subjects["Elastic models"]).filter((key) => modelPartOf(key as Key) === "router");
	expect(elsewhere).toEqual([
		...(["lora-rank", "lora-alpha", "lora-target-modules"] as const),
		...(ofRouter as Key[]),
		"llm-only",
		"modules",
	]);
});

test("further encoders differ by their widths, not by their grids", () => {
	const audio = {
		name: "audio",
		kind: "mlp",
		"placeholder-token-id": 3,
		frames: 2,
		"frame-width": 4,
		"hidden-size": 8,
	};
	const of = (module: object) => ({
		...configurationOf({ preset: "nemotron-vlm-tiny", modules: [{ ...audio, ...module }], "llm-dp": 2 }),
	});
	expect(() => requireSameModel("ck", of({}), of({ dp: 2, "lr-mult": 0.1, freeze: "tower" }))).not.toThrow();
	expect(() => requireSameModel("ck", of({}), of({ "hidden-size": 16 }))).toThrow(
		"ck holds another model: --modules is",
	);
});

test("all differences are named in one sentence; those of parts that the model lacks are none", () => {
	const text = configurationOf({ preset: "nemotron-tiny", "squared-relu": false, swiglu: true });
	const other = { "quick-geglu": true, "position-embedding-type": "rope", "patch-dim": 14, "squared-relu": false };
	const here = configurationOf({ preset: "nemotron-tiny", ...other });
	expect(() => requireSameModel("ck", { ...text }, { ...here })).toThrow(
		"ck holds another model: --swiglu is true there and false here; --quick-geglu is false there and true here; " +
			"--position-embedding-type is none there and rope here.",
	);
});

test("weights without adapters are a base for any, those with adapters are for no model without", () => {
	const base = { ...configurationOf({ preset: "nemotron-tiny" }) };
	const adapted = { ...configurationOf({ preset: "nemotron-tiny", "lora-rank": 4 }) };
	expect(modelDifferences(base, adapted)).toEqual([]);
	expect(modelDifferences(adapted, base)).toEqual(["--lora-rank is 4 there and unset here"]);
});

test("a parent without a router is a base for any, one with a router is no other model", () => {
	const flags = { flextron: true, "enable-router": true, "moe-router-bias-update-rate": 0 };
	const base = { ...configurationOf({ preset: "nemotron-tiny" }) };
	const elastic = { ...configurationOf({ preset: "nemotron-tiny", ...flags }) };
	expect(modelDifferences(base, elastic)).toEqual([]);
	expect(modelDifferences(elastic, base)).toEqual(["--flextron is true there and false here"]);
});

test("a key that is newer than the checkpoint had its default; a key that another format lacks is not compared", () => {
	const here: Record<string, unknown> = { ...configurationOf({ preset: "nemotron-tiny", "norm-epsilon": 1e-6 }) };
	const { normEpsilon: _, ...older } = here;
	expect(modelDifferences(older, here)).toEqual(["--norm-epsilon is 0.00001 there and 0.000001 here"]);
	const { modelProvider: __, ...described } = older;
	expect(modelDifferences(described, here)).toEqual([]);
});

test("the repetitions of an MTP depth do not change the model, but separate depths do", () => {
	const pattern = (hybridLayerPattern: string, mtpUseRepeatedLayer?: boolean) => ({
		hybridLayerPattern,
		...(mtpUseRepeatedLayer === undefined ? {} : { mtpUseRepeatedLayer }),
	});
	const twice = pattern("M*/*/*", true);
	expect(modelDifferences(pattern("M*/*/*/*", true), twice)).toEqual([]);
	// A Hugging Face folder does not tell whether its depth is repeated.
	expect(modelDifferences(pattern("M*/*"), twice)).toEqual([]);
	expect(modelDifferences(pattern("M*/*/*", false), twice)).toEqual([
		"--hybrid-layer-pattern is M*/*/* there and M*/* here",
		"--mtp-use-repeated-layer is false there and true here",
	]);
	expect(modelDifferences(pattern("M*/*"), pattern("M*/*/*"))).toHaveLength(1);
});
