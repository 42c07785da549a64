/** Puts whole gradients together from the parts that every rank of a tensor-parallel group printed. */
import type { ShardBlock } from "../../src/parallel/shard.ts";

export interface PrintedGradients {
	/** Full tensors; the rank's blocks alone are filled. */
	readonly gradients: Readonly<Record<string, readonly number[]>>;
	readonly blocks: Readonly<Record<string, { readonly width: number; readonly blocks: readonly ShardBlock[] }>>;
}

export function wholeGradients(ranks: readonly PrintedGradients[]): Map<string, Float64Array> {
	const whole = new Map<string, Float64Array>();
	for (const { gradients, blocks } of ranks) {
		for (const [name, values] of Object.entries(gradients)) {
			const target = whole.get(name) ?? new Float64Array(values.length).fill(Number.NaN);
			whole.set(name, target);
			const { width, blocks: parts } = blocks[name]!;
			for (const { fullRow, rows, fullColumn, columns } of parts) {
				for (let row = fullRow; row < fullRow + rows; row++) {
					for (let at = row * width + fullColumn; at < row * width + fullColumn + columns; at++)
						target[at] = values[at]!;
				}
			}
		}
	}
	return whole;
}
