/** Names and shapes of the blocks that most families have, Megatron's logical ones and Hugging Face's (docs/spec/families.md §3). */

import { addQueryKeyValue, type LayerNames, type Spelling } from "./family.ts";

export function attention({ builder, c, logical, foreign }: LayerNames): void {
	const { hiddenSize: h, numAttentionHeads: heads, kvChannels: d } = c;
	const [mine, theirs] = [`${logical}self_attention.`, `${foreign}self_attn.`];
	builder.same(`${mine}linear_qkv.layer_norm_weight`, `${foreign}input_layernorm.weight`, [h]);
	if (c.postLayernorm) {
		builder.same(`${mine}linear_proj.post_layernorm.weight`, `${foreign}post_attention_layernorm.weight`, [h]);
	}
	addQueryKeyValue(builder, c, "weight", { logical: mine, foreign: theirs });
	const biased = c.addBiasLinear || c.addAttentionBias;
	if (biased || c.addQkvBias) addQueryKeyValue(builder, c, "bias", { logical: mine, foreign: theirs });
	builder.same(`${mine}linear_proj.weight`, `${theirs}o_proj.weight`, [h, heads * d]);
	if (biased) builder.same(`${mine}linear_proj.bias`, `${theirs}o_proj.bias`, [h]);
	if (c.softmaxType === "learnable") builder.same(`${mine}core_attention.softmax_offset`, `${theirs}sinks`, [heads]);
	if (!c.qkLayernorm) return;
	for (const part of ["q", "k"]) {
		builder.same(`${mine}${part}_layernorm.weight`, `${theirs}${part}_norm.weight`, [d]);
	}
}

export function denseMlp(names: LayerNames): void {
	const { builder, c, logical, foreign } = names;
	const [before, behind] = c.postLayernorm
		? ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
		: ["post_attention_layernorm", null];
	builder.same(`${logical}mlp.linear_fc1.layer_norm_weight`, `${foreign}${before}.weight`, [c.hiddenSize]);
	if (behind !== null) {
		builder.same(`${logical}mlp.linear_fc2.post_layernorm.weight`, `${foreign}${behind}.weight`, [c.hiddenSize]);
	}
	gatedMlp(names, "mlp.", "", "mlp.", c.ffnHiddenSize);
}

/** `addStacks`: adds router and experts in the family's own way. */
export function experts(
	names: LayerNames,
	{
		addStacks,
		spelled,
	}: { readonly addStacks: ((names: LayerNames) => void) | undefined; readonly spelled: Spelling["experts"] },
): void {
	const { builder, c, logical, foreign } = names;
	builder.same(`${logical}pre_mlp_layernorm.weight`, `${foreign}post_attention_layernorm.weight`, [c.hiddenSize]);
	if (addStacks) {
		addStacks(names);
		return;
	}
	builder.same(`${logical}mlp.router.weight`, `${foreign}mlp.gate.weight`, [c.numExperts, c.hiddenSize]);
	if (c.moeRouterEnableExpertBias) {
		const biases = [`${logical}mlp.router.expert_bias`, `${foreign}mlp.gate.e_score_correction_bias`] as const;
		builder.same(...biases, [c.numExperts]);
	}
	if (c.moeSharedExpertIntermediateSize > 0) {
		gatedMlp(
			names,
			"mlp.shared_experts.",
			"",
			`mlp.${c.moeSharedExpertGate ? "shared_expert" : "shared_experts"}.`,
			c.moeSharedExpertIntermediateSize,
		);
		if (c.moeSharedExpertGate) {
			builder.same(`${logical}mlp.shared_experts.gate_weight`, `${foreign}mlp.shared_expert_gate.weight`, [
				1,
				c.hiddenSize,
			]);
		}
	}
	if (spelled !== "separate") packedExperts(names, spelled === "transposed");
	for (let expert = 0; spelled === "separate" && expert < c.numExperts; expert++) {
		gatedMlp(names, "mlp.experts.", String(expert), `mlp.experts.${expert}.`, c.moeFfnHiddenSize);
	}
}

/** All experts of a layer in one tensor of each projection. */
function packedExperts({ builder, c, logical, foreign }: LayerNames, transposed: boolean): void {
	for (const [part, theirs, shape] of [
		["fc1", "gate_up_proj", [2 * c.moeFfnHiddenSize, c.hiddenSize]],
		["fc2", "down_proj", [c.hiddenSize, c.moeFfnHiddenSize]],
	] as const) {
		const other = `${foreign}mlp.experts.${theirs}`;
		const length = shape[0] * shape[1];
		const [rows, columns] = shape;
		builder.addForeign(other, [c.numExperts, ...(transposed ? [columns, rows] : shape)]);
		for (let expert = 0; expert < c.numExperts; expert++) {
			const name = `${logical}mlp.experts.linear_${part}.weight${expert}`;
			builder.addLogical(name, shape);
			const offset = expert * length;
			if (!transposed) {
				builder.link({ logical: name, foreign: other, foreignRuns: { offset, stride: length }, count: 1, length });
				continue;
			}
			const runs = { logicalRuns: { offset: 0, stride: columns }, foreignRuns: { offset, stride: 1, step: rows } };
			builder.link({ logical: name, foreign: other, ...runs, count: rows, length: columns });
		}
	}
}

/** fc1 holds the gate's rows, then the linear half's. */
function gatedMlp(
	{ builder, c, logical, foreign }: LayerNames,
	mine: string,
	number: string,
	theirs: string,
	f: number,
) {
	const first = (end: string, width: number) => {
		const shape = (rows: number) => (end === "bias" ? [rows] : [rows, width]);
		const name = `${logical}${mine}linear_fc1.${end}${number}`;
		builder.addLogical(name, shape(2 * f));
		for (const [part, logicalRow] of [
			["gate", 0],
			["up", f],
		] as const) {
			const other = `${foreign}${theirs}${part}_proj.${end}`;
			builder.addForeign(other, shape(f));
			builder.rows({ logical: name, foreign: other, width, rows: f, logicalRow });
		}
	};
	const second = (end: string, shape: readonly number[]) =>
		builder.same(`${logical}${mine}linear_fc2.${end}${number}`, `${foreign}${theirs}down_proj.${end}`, shape);
	first("weight", c.hiddenSize);
	second("weight", [c.hiddenSize, f]);
	if (!c.addBiasLinear) return;
	first("bias", 1);
	second("bias", [c.hiddenSize]);
}
