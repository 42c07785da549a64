/** Names and rows of Gated DeltaNet's tensors in Qwen3-Next's and Qwen3.5's folders (docs/spec/families.md §2.5, §3). */
import { valuesAt } from "../../../config/language-model.ts";
import { linearAttentionSizes } from "../../../models/language/config.ts";
import type { LayerNames } from "./family.ts";

/** The projections: joined key head by key head (Qwen3-Next), or q, k, v and z, b, a apart (Qwen3.5). */
export type GatedDeltaLayout = "joined" | "apart";

/** The layout that a tensor's or an adapter's name is of; null: of none. */
export function gatedDeltaLayoutOf(name: string): GatedDeltaLayout | null {
	const end = /\.linear_attn\.in_proj_(\w+)\./.exec(name)?.[1];
	return end === undefined ? null : end === "qkvz" || end === "ba" ? "joined" : "apart";
}

export function addGatedDelta({ builder, c, logical, foreign }: LayerNames, layout: GatedDeltaLayout): void {
	const h = c.hiddenSize;
	const { keyHeads, keyDim, valueHeads, valueDim, convKernel } = valuesAt("linearAttention.", c);
	const { keys, values, convolution, projection } = linearAttentionSizes({ keyHeads, keyDim, valueHeads, valueDim });
	const [mine, theirs] = [`${logical}self_attention.`, `${foreign}linear_attn.`];
	builder.same(`${mine}in_proj.layer_norm_weight`, `${foreign}input_layernorm.weight`, [h]);
	const name = `${mine}in_proj.weight`;
	builder.addLogical(name, [projection, h]);
	/** Parts of a tensor, whose rows are `first` of the logical weight's and on; of every key head in turn, or whole. */
	const add = (end: string, parts: readonly (readonly [first: number, rows: number])[]) => {
		const other = `${theirs}${end}.weight`;
		const all = parts.reduce((sum, [, rows]) => sum + rows, 0);
		builder.addForeign(other, [all, h]);
		const count = layout === "joined" ? keyHeads : 1;
		let foreignRow = 0;
		for (const [logicalRow, rows] of parts) {
			const own = rows / count;
			builder.rows({
				...{ logical: name, foreign: other, width: h, rows: own, count },
				...{ logicalRow, logicalStride: own, foreignRow, foreignStride: all / count },
			});
			foreignRow += own;
		}
	};
	// Rows of the logical weight: q, k, v, z, b, a, each of all heads.
	const q = [0, keys] as const;
	const k = [keys, keys] as const;
	const v = [2 * keys, values] as const;
	const z = [2 * keys + values, values] as const;
	const b = [2 * keys + 2 * values, valueHeads] as const;
	const a = [2 * keys + 2 * values + valueHeads, valueHeads] as const;
	const tensors: readonly (readonly [string, readonly (readonly [number, number])[]])[] =
		layout === "joined"
			? [
					["in_proj_qkvz", [q, k, v, z]],
					["in_proj_ba", [b, a]],
				]
			: [
					["in_proj_qkv", [q, k, v]],
					["in_proj_z", [z]],
					["in_proj_b", [b]],
					["in_proj_a", [a]],
				];
	for (const [end, parts] of tensors) add(end, parts);
	builder.same(`${mine}conv1d.weight`, `${theirs}conv1d.weight`, [convolution, 1, convKernel]);
	builder.same(`${mine}dt_bias`, `${theirs}dt_bias`, [valueHeads]);
	builder.same(`${mine}A_log`, `${theirs}A_log`, [valueHeads]);
	builder.same(`${mine}out_norm.weight`, `${theirs}norm.weight`, [valueDim]);
	builder.same(`${mine}out_proj.weight`, `${theirs}out_proj.weight`, [h, values]);
}
