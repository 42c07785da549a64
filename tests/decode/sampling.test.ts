/** The next token: drawn as often as its probability says, among those that are kept. */
import { expect, test } from "bun:test";
import { choose, greedy, type SamplingOptions } from "../../src/decode/sampling.ts";

/** Probabilities 0.4, 0.3, 0.2, 0.1 of tokens 2, 0, 3, 1. */
const logits = Float32Array.from([0.3, 0.1, 0.4, 0.2], Math.log);

/** Share of a fine grid of random numbers that gives each token. */
function shares(options: Partial<SamplingOptions>, from = logits, points = 20_000): number[] {
	const counts = new Array<number>(from.length).fill(0);
	for (let i = 0; i < points; i++) {
		counts[choose(from, { ...greedy, temperature: 1, ...options }, (i + 0.5) / points)]!++;
	}
	return counts.map((count) => Math.round((count / points) * 1000) / 1000);
}

test("temperature 0 is the likeliest, the lowest of equal ones", () => {
	expect(choose(logits, greedy, 0.9)).toBe(2);
	expect(choose(Float32Array.of(1, 5, 5), greedy, 0.9)).toBe(1);
});

test("every token is drawn as often as its probability says", () => {
	expect(shares({})).toEqual([0.3, 0.1, 0.4, 0.2]);
});

test("temperature sharpens: probabilities to the power of its inverse", () => {
	const squares = [0.09, 0.01, 0.16, 0.04].map((p) => Math.round((p / 0.3) * 1000) / 1000);
	expect(shares({ temperature: 0.5 })).toEqual(squares);
});

test("top-k keeps the k likeliest", () => {
	expect(shares({ topK: 1 })).toEqual([0, 0, 1, 0]);
	expect(shares({ topK: 2 })).toEqual([0.429, 0, 0.571, 0]);
	expect(shares({ topK: 9 })).toEqual([0.3, 0.1, 0.4, 0.2]);
});

test("top-p keeps the fewest likeliest that reach it", () => {
	expect(shares({ topP: 0.39 })).toEqual([0, 0, 1, 0]);
	expect(shares({ topP: 0.65 })).toEqual([0.429, 0, 0.571, 0]);
	expect(shares({ topP: 0.75 })).toEqual([0.333, 0, 0.444, 0.222]);
});

test("top-p counts within top-k", () => {
	// Of the two likeliest, 0.4 and 0.3, the first has a share of 0.57.
	expect(shares({ topK: 2, topP: 0.5 })).toEqual([0, 0, 1, 0]);
	expect(shares({ topK: 2, topP: 0.6 })).toEqual([0.429, 0, 0.571, 0]);
});

test("a large vocabulary: the kept tokens are those that sorting all of them finds", () => {
	const size = 5000;
	let state = 1;
	const many = Float32Array.from({ length: size }, () => {
		state = (state * 48271) % 2147483647;
		return 8 * (state / 2147483647);
	});
	const weights = Array.from(many, (logit, id) => ({ id, weight: Math.exp(logit) }));
	const sorted = weights.toSorted((a, b) => b.weight - a.weight);
	const total = weights.reduce((sum, { weight }) => sum + weight, 0);
	const nucleus = new Set<number>();
	let sum = 0;
	for (const { id, weight } of sorted) {
		if (sum >= 0.3 * total) break;
		nucleus.add(id);
		sum += weight;
	}
	const drawn = (options: Partial<SamplingOptions>) => {
		const found = new Set<number>();
		for (let i = 0; i < 500; i++) found.add(choose(many, { ...greedy, temperature: 1, ...options }, i / 500));
		return found;
	};
	const byMass = drawn({ topP: 0.3 });
	expect([...byMass].filter((id) => !nucleus.has(id))).toEqual([]);
	expect(byMass.size).toBeGreaterThan(nucleus.size / 2);
	const byCount = drawn({ topK: 20 });
	expect([...byCount].sort()).toEqual(
		sorted
			.slice(0, 20)
			.map(({ id }) => id)
			.sort(),
	);
});

test("logits that are not finite are an error", () => {
	expect(() => choose(Float32Array.of(Number.NaN, Number.NaN), greedy, 0)).toThrow(/not finite/);
});
