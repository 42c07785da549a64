/** Frequencies of rotary embeddings that are no geometric series. */
import type { HybridConfig } from "./config.ts";

/**
 * Radians a position for every pair of columns that turns, f64 [rotary columns / 2]: base^(-2i / columns). Those with few
 * turns in the original context are divided by the factor (Llama 3; docs/spec/families.md §2.2).
 */
export function ropeFrequencies(
	{ base, percent, scaling }: NonNullable<HybridConfig["attention"]["rope"]>,
	headDim: number,
): Float64Array {
	const columns = Math.floor(headDim * percent);
	const { factor, lowTurns, highTurns, originalLength } = scaling!;
	return Float64Array.from({ length: columns / 2 }, (_, pair) => {
		const frequency = base ** ((-2 * pair) / columns);
		const turns = (originalLength * frequency) / (2 * Math.PI);
		const kept = Math.min(1, Math.max(0, (turns - lowTurns) / (highTurns - lowTurns)));
		return frequency * (kept + (1 - kept) / factor);
	});
}
