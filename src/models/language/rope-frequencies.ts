/** Frequencies of rotary embeddings that are no geometric series (docs/spec/families.md §2.2). */
import type { Rope, RopeScaling } from "./config.ts";

/** Radians a position for every pair of columns that turns, f64 [rotary columns / 2]: base^(-2i / columns), scaled. */
export function ropeFrequencies(rope: Rope, headDim: number): Float64Array {
	const { base, scaling } = rope;
	const frequencies = series(rope, headDim);
	const kept = keptShares(frequencies, base, scaling!);
	return frequencies.map((frequency, pair) => frequency * (kept[pair]! + (1 - kept[pair]!) / scaling!.factor));
}

/**
 * Multimodal rotary embedding: the frequencies of every axis of positions, each with zeros for the pairs that turn by another
 * (docs/spec/families.md §2.2). Turns of a pair add up, so that the axes may turn one after another.
 */
export function axisFrequencies(rope: Rope, headDim: number, { sections, interleaved }: MropeAxes): Float64Array[] {
	const all = rope.scaling === null ? series(rope, headDim) : ropeFrequencies(rope, headDim);
	const ends = sections.map((_, axis) => sections.slice(0, axis + 1).reduce((sum, count) => sum + count, 0));
	const axisOf = (pair: number) => {
		if (!interleaved)
			return Math.max(
				0,
				ends.findIndex((end) => pair < end),
			);
		const axis = pair % sections.length;
		return pair < sections.length * sections[axis]! ? axis : 0;
	};
	return sections.map((_, axis) => all.map((frequency, pair) => (axisOf(pair) === axis ? frequency : 0)));
}

interface MropeAxes {
	/** Pairs of every axis. */
	readonly sections: readonly number[];
	readonly interleaved: boolean;
}

function series({ base, percent }: Rope, headDim: number): Float64Array {
	const columns = Math.floor(headDim * percent);
	return Float64Array.from({ length: columns / 2 }, (_, pair) => base ** ((-2 * pair) / columns));
}

/** The share of every frequency that is not divided by the factor. */
function keptShares(frequencies: Float64Array, base: number, scaling: RopeScaling): Float64Array {
	if (scaling.type === "linear") return new Float64Array(frequencies.length);
	const { lowTurns, highTurns, originalLength, wholeIndices } = scaling;
	const turns = (frequency: number) => (originalLength * frequency) / (2 * Math.PI);
	if (scaling.type === "llama3") {
		return frequencies.map((frequency) => unit((turns(frequency) - lowTurns) / (highTurns - lowTurns)));
	}
	// YaRN interpolates between indices of pairs, not between turns.
	const columns = 2 * frequencies.length;
	const index = (ofTurns: number) => (columns * Math.log(turns(1) / ofTurns)) / (2 * Math.log(base));
	const [first, last] = [index(highTurns), index(lowTurns)];
	const from = Math.max(wholeIndices ? Math.floor(first) : first, 0);
	const to = Math.min(wholeIndices ? Math.ceil(last) : last, columns - 1);
	return frequencies.map((_, pair) => 1 - unit((pair - from) / (to === from ? 0.001 : to - from)));
}

const unit = (value: number) => Math.min(1, Math.max(0, value));

/** YaRN's factor of cosines and sines of queries and keys, M(mscale) / M(mscaleAllDim). */
export function yarnAmplitude(factor: number, mscale: number, mscaleAllDim: number): number {
	const magnitude = (of: number) => (factor > 1 ? 0.1 * of * Math.log(factor) + 1 : 1);
	return magnitude(mscale) / magnitude(mscaleAllDim);
}
