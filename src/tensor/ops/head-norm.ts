/** RMSNorm of every query head and every key head of a fused projection (docs/spec/families.md §2.3). */
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, copyInto, Tensor } from "../tensor.ts";
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
	const { queryHeads, keyHeads, headDim: d, query, key, epsilon, zeroCentred = false } = options;
	const normalised = queryHeads / keyHeads + 1;
	const rows = qkv.rows * keyHeads;
	// A row for every key head of a token.
	const asGroups = (x: Tensor) => x.view([rows, (normalised + 1) * d]);
	const heads = Array.from({ length: normalised }, (_, head) => ({
		column: head * d,
		weight: head === normalised - 1 ? key : query,
		rstd: Tensor.empty(device, [rows, 1]),
	}));
	const shape = { rows, width: d, group_size: d, ...weightOffset(zeroCentred), dtype: qkv.dtypeCode };
	const trains = qkv.gradient !== null || query.trainable || key.trainable;
	const y = tape.output(Tensor.empty(device, qkv.shape, qkv.dtype), trains);
	{
		using from = asGroups(qkv);
		using to = asGroups(y);
		for (const { column, weight, rstd } of heads) {
			using x = from.columns(column, d);
			using out = to.columns(column, d);
			device.run("rms_norm_forward", {
				...shape,
				...{ x, residual: null, sum: null, weight: weight.value, y: out, rstd, epsilon },
				...{ x_stride: x.stride, y_stride: out.stride, weight_dtype: weight.value.dtypeCode },
			});
		}
		passValues(from, to, normalised * d);
	}
	tape.record({
		name: "head_norm",
		outputs: [y],
		keep: [qkv],
		own: heads.map(({ rstd }) => rstd),
		parameters: [query, key],
		backward: ([dy]) => {
			using dqkv = qkv.gradient?.contiguousTarget() ?? Tensor.empty(device, qkv.shape, qkv.dtype, "workspace");
			using gradient = contiguous(dy!);
			using from = asGroups(gradient);
			using input = asGroups(qkv);
			using to = asGroups(dqkv);
			for (const { column, weight, rstd } of heads) {
				using dout = from.columns(column, d);
				using x = input.columns(column, d);
				using dx = to.columns(column, d);
				device.run("rms_norm_backward", {
					...shape,
					...{ dy: dout, x, weight: weight.value, rstd, dresidual: null, dx, dweight: weight.mainGradient },
					...{ dy_stride: dout.stride, x_stride: x.stride, dx_stride: dx.stride },
					weight_dtype: weight.value.dtypeCode,
				});
			}
			passValues(from, to, normalised * d);
			qkv.gradient?.accumulate(dqkv.share());
		},
	});
	return y;
}

/** Copies the columns behind the normalised ones. */
function passValues(from: Tensor, to: Tensor, first: number): void {
	using value = from.columns(first, from.width - first);
	using passed = to.columns(first, from.width - first);
	copyInto(value, passed);
}
