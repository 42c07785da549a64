/** RMSNorm of every query head and every key head of a fused projection (docs/spec/families.md §2.3). */
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";
import type { AttentionHeads } from "./attention.ts";
import { weightOffset } from "./rms-norm.ts";

export interface HeadNormOptions extends AttentionHeads {
	/** Weights [headDim] that all query heads share, and all key heads. */
	readonly query: Parameter;
	readonly key: Parameter;
	readonly epsilon: number;
	/** Whether γ is 1 + weight. */
	readonly zeroCentred?: boolean;
}

/**
 * y = x rsqrt(mean(x²) + ε) γ over each query head and each key head; values pass. qkv_T((nq+2ng)d), per key head
 * [q … q, k, v], contiguous, f32 or bf16 → the same shape and type.
 */
export function headNorm(tape: Tape, qkv: Tensor, options: HeadNormOptions): Tensor {
	const { device } = tape;
	const { queryHeads, keyHeads, headDim, query, key, epsilon, zeroCentred = false } = options;
	const normalised = queryHeads / keyHeads + 1;
	// A row for every key head of a token.
	const rows = qkv.rows * keyHeads;
	const shape = {
		...{
			rows,
			width: (normalised + 1) * headDim,
			head_dim: headDim,
			...weightOffset(zeroCentred),
			dtype: qkv.dtypeCode,
		},
		...{ query_weight: query.value, key_weight: key.value, weight_dtype: query.value.dtypeCode },
	};
	const rstd = Tensor.empty(device, [normalised, rows]);
	const trains = qkv.gradient !== null || query.trainable || key.trainable;
	const y = tape.output(Tensor.empty(device, qkv.shape, qkv.dtype), trains);
	device.run("head_norm_forward", { ...shape, x: qkv, y, rstd, epsilon });
	tape.record({
		name: "head_norm",
		outputs: [y],
		keep: [qkv],
		own: [rstd],
		parameters: [query, key],
		backward: ([dy]) => {
			using dx = qkv.gradient?.contiguousTarget() ?? Tensor.empty(device, qkv.shape, qkv.dtype, "workspace");
			using gradient = contiguous(dy!);
			device.run("head_norm_backward", {
				...{ ...shape, dy: gradient, x: qkv, rstd, dx },
				...{ dquery_weight: query.mainGradient, dkey_weight: key.mainGradient },
			});
			qkv.gradient?.accumulate(dx.share());
		},
	});
	return y;
}
