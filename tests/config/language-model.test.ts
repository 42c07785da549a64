/** Each option of the language model stands once in the tables of keys; here, that nothing which follows from them lacks one. */
import { expect, test } from "bun:test";
import * as v from "valibot";
import { argumentsOf, configurationFromArguments } from "../../src/checkpoint/torch-dist/arguments.ts";
import { type At, familyDefaults, type LanguageKey, toldKeys, withDefaults } from "../../src/config/language-model.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { fieldOf, propertyOf, type TrainingConfiguration } from "../../src/config/schema.ts";
import { describedConfig, hybridConfig } from "../../src/models/language/from-configuration.ts";

/** Models in which an option may matter. */
const models: readonly TrainingConfiguration[] = [
	{ "position-embedding-type": "rope", "use-rope-scaling": true, "moe-router-num-groups": 4 },
	{ "hybrid-layer-pattern": "*-*E", "position-embedding-type": "yarn", "window-size": [7, 0] },
	{ "position-embedding-type": "yarn", "rotary-scaling-factor": 8, "mscale-all-dim": 0.5 },
	{ "hybrid-layer-pattern": "*-*-", "position-embedding-type": "learned_absolute" },
	{ "hybrid-layer-pattern": "+-+E", "num-query-groups": 4, "position-embedding-type": "none" },
	{ "hybrid-layer-pattern": "G-*E" },
	{ "hybrid-layer-pattern": "ME*-/*E/*E" },
].map((own) => configurationOf({ preset: "nemotron-tiny", "num-attention-heads": 4, "squared-relu": false, ...own }));

/** Another legal value of the key. */
function otherThan(key: LanguageKey, value: unknown): unknown {
	const { schema, placeholder } = fieldOf(key).type;
	const [numbers, text] = [[Number(value) + 1, 3, 0.25], placeholder.split("|")];
	const candidates = [!value, ...numbers, ...text, [1], [3, 0], ["none"]];
	return candidates.find((other) => v.is(schema, other) && !Bun.deepEquals(other, value));
}

/** Whether `holds` is true of any of the models with another value of the key. */
function changed(
	key: LanguageKey,
	holds: (c: TrainingConfiguration, model: TrainingConfiguration) => boolean,
): boolean {
	const property = propertyOf(key);
	return models.some((model) => holds({ ...model, [property]: otherThan(key, model[property]) }, model));
}

/** The pattern tells the number of layers; the length of a chunk is a constant in Megatron. */
const constants: readonly LanguageKey[] = ["hybrid-layer-pattern", "num-layers", "mamba-chunk-size"];

test.each(toldKeys.filter((key) => !constants.includes(key)))("%s comes back from Megatron's arguments", (key) => {
	const told = (c: TrainingConfiguration): Partial<TrainingConfiguration> =>
		configurationFromArguments(argumentsOf(c, 256))!;
	expect(changed(key, (c) => Bun.deepEquals(told(c)[propertyOf(key)], c[propertyOf(key)]))).toBe(true);
});

test.each(toldKeys.filter((key) => !/pattern|num-layers/.test(key)))("%s changes the model's configuration", (key) => {
	expect(changed(key, (c, model) => !Bun.deepEquals(hybridConfig(c), hybridConfig(model)))).toBe(true);
});

test("an option that a description lacks has its default", () => {
	for (const c of models) {
		const told = Object.fromEntries(toldKeys.map(propertyOf).map((property) => [property, c[property]]));
		const standing = withDefaults({}) as Readonly<Record<string, unknown>>;
		const few = Object.fromEntries(
			Object.entries(told).filter(([name, value]) => !Bun.deepEquals(value, standing[name])),
		);
		expect(describedConfig(few as never, { bf16: false })).toEqual(describedConfig(told as never, { bf16: false }));
	}
	expect(familyDefaults).toMatchObject({ postLayernorm: false, softmaxType: "vanilla", windowSize: null });
	expect("rotaryBase" in familyDefaults).toBe(false);
	// @ts-expect-error: a place that no key has is no property of the model's configuration.
	type Planted = At<"attention.">["planted"];
	expect<Planted | null>(null).toBeNull();
});
