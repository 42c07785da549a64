/** Scores of an answer against those that are right, from 0 to 1. */

export const metrics = ["exact_match", "accuracy", "anls"] as const;
export type Metric = (typeof metrics)[number];

/** The names of metrics in tables. */
export const metricNames: Readonly<Record<Metric, string>> = {
	exact_match: "exact match",
	accuracy: "accuracy",
	anls: "ANLS",
};

const scores: Readonly<Record<Metric, (text: string, right: string) => number>> = {
	/** Equal, but for surrounding space. */
	exact_match: (text, right) => Number(text.trim() === right.trim()),
	/** Equal, but for case, punctuation, articles and space, as questions of SQuAD are judged. */
	accuracy: (text, right) => Number(plain(text) === plain(right)),
	anls,
};

/** The best score over the right answers. */
export function scoreOf(metric: Metric, text: string, answers: readonly string[]): number {
	return Math.max(...answers.map((answer) => scores[metric](text, answer)));
}

function plain(text: string): string {
	return text
		.toLowerCase()
		.replaceAll(/[!-/:-@[-`{-~]/g, "")
		.replaceAll(/\b(?:a|an|the)\b/g, " ")
		.split(/\s+/)
		.filter((word) => word !== "")
		.join(" ");
}

/** Below it an answer is wrong. */
const leastSimilarity = 0.5;

/**
 * Normalized Levenshtein similarity (Biten et al., Scene Text Visual Question Answering, 2019) of texts in lower case with single
 * spaces, as lmms-eval computes it for DocVQA and InfographicVQA: 1 − distance / length of the longer one; 0 below one half.
 */
function anls(text: string, right: string): number {
	const [own, wanted] = [text, right].map((one) => [...one.trim().toLowerCase().split(/\s+/).join(" ")]);
	const longest = Math.max(own!.length, wanted!.length);
	const similarity = longest === 0 ? 1 : 1 - levenshtein(own!, wanted!) / longest;
	return similarity < leastSimilarity ? 0 : similarity;
}

/** Insertions, deletions and replacements of characters that make one text of the other. */
function levenshtein(one: readonly string[], other: readonly string[]): number {
	let row = Array.from({ length: other.length + 1 }, (_, at) => at);
	for (const [i, character] of one.entries()) {
		const next = [i + 1];
		for (const [j, wanted] of other.entries()) {
			next.push(Math.min(row[j + 1]! + 1, next[j]! + 1, row[j]! + Number(character !== wanted)));
		}
		row = next;
	}
	return row.at(-1)!;
}
