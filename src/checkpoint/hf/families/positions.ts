/** Rotary embeddings in a config.json (docs/spec/families.md §2.2). */
import { ropeScalingDefaults } from "../../../config/keys/model.ts";
import { yarnOf } from "../../../config/yarn.ts";
import { pythonFloat } from "../json.ts";
import { fraction, type Json, type LanguageModelConfiguration, type Refuse, whole } from "./family.ts";

const isObject = (value: unknown): value is Json =>
	typeof value === "object" && value !== null && !Array.isArray(value);

/** Reads the form of transformers 5 (rope_parameters) or of 4 (rope_theta, rope_scaling). */
export function readPositions(values: Json, bad: Refuse) {
	const { rope_parameters: newer, rope_scaling: older } = values;
	const given = isObject(newer) ? newer : isObject(older) ? older : {};
	const type = given.rope_type ?? given.type ?? "default";
	if (typeof type !== "string" || !Object.hasOwn(scalings, type)) {
		const known = Object.keys(scalings).map((name) => JSON.stringify(name));
		bad(`rope_type is ${JSON.stringify(type)}; ${known.join(", ")} can be read`);
	}
	const part = { partial_rotary_factor: given.partial_rotary_factor ?? values.partial_rotary_factor };
	const theta = { rope_theta: given.rope_theta ?? values.rope_theta };
	return {
		rotaryBase: fraction(theta, "rope_theta", 10000, bad),
		rotaryPercent: fraction(part, "partial_rotary_factor", 1, bad),
		useRopeScaling: false,
		...scalings[type as keyof typeof scalings](given, bad, values.max_position_embeddings as number | undefined),
	};
}

/** The keys of a kind of scaling. `length`: max_position_embeddings. */
type Scaling = (given: Json, bad: Refuse, length: number | undefined) => Partial<LanguageModelConfiguration>;

const scalings = {
	default: () => ({}),
	linear: (given, bad) => ({ rotarySeqLenInterpolationFactor: fraction(given, "factor", 1, bad) }),
	llama3: (given, bad, length) => ({
		useRopeScaling: true,
		ropeScalingFactor: fraction(given, "factor", ropeScalingDefaults.factor, bad),
		ropeScalingLowFreqFactor: fraction(given, "low_freq_factor", ropeScalingDefaults.lowFreqFactor, bad),
		ropeScalingHighFreqFactor: fraction(given, "high_freq_factor", ropeScalingDefaults.highFreqFactor, bad),
		ropeScalingOriginalMaxPositionEmbeddings: originalLength(
			given,
			bad,
			length ?? ropeScalingDefaults.originalMaxPositionEmbeddings,
		),
	}),
	yarn: (given, bad, length) => {
		const standing = yarnOf({});
		const original = originalLength(given, bad, length ?? standing.yarnOriginalMaxPositionEmbeddings);
		const { mscale, mscale_all_dim: allDim, attention_factor: own, truncate = true } = given;
		if (typeof truncate !== "boolean") bad(`truncate is ${JSON.stringify(truncate)}, expected true or false`);
		return {
			positionEmbeddingType: "yarn",
			rotaryScalingFactor: fraction(given, "factor", (length ?? original) / original, bad),
			yarnOriginalMaxPositionEmbeddings: original,
			yarnBetaFast: fraction(given, "beta_fast", standing.yarnBetaFast, bad),
			yarnBetaSlow: fraction(given, "beta_slow", standing.yarnBetaSlow, bad),
			yarnCorrectionRangeRoundToInt: truncate as boolean,
			// transformers takes both or neither.
			mscale: mscale && allDim ? fraction(given, "mscale", 1, bad) : 1,
			mscaleAllDim: mscale && allDim ? fraction(given, "mscale_all_dim", 0, bad) : 0,
			yarnAttentionFactor: (own ?? null) === null ? null : fraction(given, "attention_factor", 1, bad),
		};
	},
} as const satisfies Readonly<Record<string, Scaling>>;

function originalLength(given: Json, bad: Refuse, missing: number): number {
	return whole(given, "original_max_position_embeddings", missing, bad);
}

/** The form of transformers 4, which 5 reads too. */
export function writtenPositions(c: LanguageModelConfiguration): Json {
	return {
		rope_theta: pythonFloat(c.rotaryBase),
		...(c.rotaryPercent !== 1 && { partial_rotary_factor: pythonFloat(c.rotaryPercent) }),
		rope_scaling: writtenScaling(c),
	};
}

function writtenScaling(c: LanguageModelConfiguration): Json | null {
	if (c.positionEmbeddingType === "yarn") {
		const yarn = yarnOf(c);
		return {
			rope_type: "yarn",
			factor: pythonFloat(yarn.rotaryScalingFactor),
			original_max_position_embeddings: yarn.yarnOriginalMaxPositionEmbeddings,
			beta_fast: pythonFloat(yarn.yarnBetaFast),
			beta_slow: pythonFloat(yarn.yarnBetaSlow),
			truncate: yarn.yarnCorrectionRangeRoundToInt,
			...(yarn.mscaleAllDim !== 0 && {
				mscale: pythonFloat(yarn.mscale),
				mscale_all_dim: pythonFloat(yarn.mscaleAllDim),
			}),
			...(yarn.yarnAttentionFactor !== null && { attention_factor: pythonFloat(yarn.yarnAttentionFactor) }),
		};
	}
	if (c.rotarySeqLenInterpolationFactor != null) {
		return { rope_type: "linear", factor: pythonFloat(c.rotarySeqLenInterpolationFactor) };
	}
	if (!c.useRopeScaling) return null;
	return {
		rope_type: "llama3",
		factor: pythonFloat(c.ropeScalingFactor ?? ropeScalingDefaults.factor),
		low_freq_factor: pythonFloat(c.ropeScalingLowFreqFactor ?? ropeScalingDefaults.lowFreqFactor),
		high_freq_factor: pythonFloat(c.ropeScalingHighFreqFactor ?? ropeScalingDefaults.highFreqFactor),
		original_max_position_embeddings:
			c.ropeScalingOriginalMaxPositionEmbeddings ?? ropeScalingDefaults.originalMaxPositionEmbeddings,
	};
}
