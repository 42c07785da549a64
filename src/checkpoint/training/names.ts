/** Names of optimizer tensors in a checkpoint (docs/spec/checkpoint.md §8.3). */

export const optimizerStates = ["param", "exp_avg", "exp_avg_sq"] as const;
export type OptimizerStateName = (typeof optimizerStates)[number];

/** fp32, of the weight's logical shape. */
export function optimizerName(state: OptimizerStateName, name: string): string {
	return `optimizer.state.${state}.${name}`;
}

export function isOptimizerName(name: string): boolean {
	return name.startsWith("optimizer.");
}

/** Whether a tensor has a row a token, padded perhaps with rows that mean nothing (docs/spec/checkpoint.md §6.3). */
export function isVocabulary(name: string): boolean {
	return /(^|\.)(embedding\.word_embeddings|output_layer)\.weight$/.test(name);
}
