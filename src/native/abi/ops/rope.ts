/** Generated from cuda/include/mimo/ops/rope.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const operations = {
	rope_forward: {
		x: "ptr",
		y: "ptr",
		cu_seqlens: "ptr",
		first_positions: "ptr",
		frequencies: "ptr",
		sequences: "i64",
		tokens: "i64",
		max_seqlen: "i64",
		groups: "i64",
		heads_per_group: "i64",
		rotated_per_group: "i64",
		head_dim: "i64",
		rotary_dim: "i64",
		x_stride: "i64",
		y_stride: "i64",
		base: "f32",
		angle_scale: "f32",
		dtype: "i32",
	},
} as const;
