/** Rotary embeddings in a config.json (docs/spec/families.md §2.2). */
import { withDefaults } from "../../../config/language-model.ts";
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
		...multimodal(given, bad),
		...scalings[type as keyof typeof scalings](given, bad, values.max_position_embeddings as number | undefined),
	};
}

const standing = withDefaults({});

/** The axes of multimodal rotary embeddings, if there are any. */
function multimodal({ mrope_section: section, mrope_interleaved: interleaved }: Json, bad: Refuse) {
	if (section === undefined || section === null) return {};
	const counts =
		Array.isArray(section) && section.length === 3 && section.every((n) => Number.isSafeInteger(n) && n >= 0);
	if (!counts)
		bad(`mrope_section is ${JSON.stringify(section)}, expected numbers of frequencies for time, row and column`);
	return { mropeSection: section as readonly number[], mropeInterleaved: interleaved === true };
}

/** The keys of a kind of scaling. `length`: max_position_embeddings. */
type Scaling = (given: Json, bad: Refuse, length: number | undefined) => Partial<LanguageModelConfiguration>;

const scalings = {
	default: () => ({}),
	linear: (given, bad) => ({ rotarySeqLenInterpolationFactor: fraction(given, "factor", 1, bad) }),
	llama3: (given, bad, length) => ({
		useRopeScaling: true,
		ropeScalingFactor: fraction(given, "factor", standing.ropeScalingFactor, bad),
		ropeScalingLowFreqFactor: fraction(given, "low_freq_factor", standing.ropeScalingLowFreqFactor, bad),
		ropeScalingHighFreqFactor: fraction(given, "high_freq_factor", standing.ropeScalingHighFreqFactor, bad),
		ropeScalingOriginalMaxPositionEmbeddings: originalLength(
			given,
			bad,
			length ?? standing.ropeScalingOriginalMaxPositionEmbeddings,
		),
	}),
	yarn: (given, bad, length) => {
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
export function writtenPositions(description: LanguageModelConfiguration): Json {
	const c = withDefaults(description);
	return {
		rope_theta: pythonFloat(c.rotaryBase),
		...(c.rotaryPercent !== 1 && { partial_rotary_factor: pythonFloat(c.rotaryPercent) }),
		rope_scaling: writtenScaling(c),
	};
}

function writtenScaling(c: ReturnType<typeof withDefaults<LanguageModelConfiguration>>): Json | null {
	if (c.mropeSection) {
		return { rope_type: "default", mrope_section: c.mropeSection, mrope_interleaved: c.mropeInterleaved ?? false };
	}
	if (c.positionEmbeddingType === "yarn") {
		return {
			rope_type: "yarn",
			factor: pythonFloat(c.rotaryScalingFactor),
			original_max_position_embeddings: c.yarnOriginalMaxPositionEmbeddings,
			beta_fast: pythonFloat(c.yarnBetaFast),
			beta_slow: pythonFloat(c.yarnBetaSlow),
			truncate: c.yarnCorrectionRangeRoundToInt,
			...(c.mscaleAllDim !== 0 && {
				mscale: pythonFloat(c.mscale),
				mscale_all_dim: pythonFloat(c.mscaleAllDim),
			}),
			...(c.yarnAttentionFactor !== null && { attention_factor: pythonFloat(c.yarnAttentionFactor) }),
		};
	}
	if (c.rotarySeqLenInterpolationFactor != null) {
		return { rope_type: "linear", factor: pythonFloat(c.rotarySeqLenInterpolationFactor) };
	}
	if (!c.useRopeScaling) return null;
	return {
		rope_type: "llama3",
		factor: pythonFloat(c.ropeScalingFactor),
		low_freq_factor: pythonFloat(c.ropeScalingLowFreqFactor),
		high_freq_factor: pythonFloat(c.ropeScalingHighFreqFactor),
		original_max_position_embeddings: c.ropeScalingOriginalMaxPositionEmbeddings,
	};
}
