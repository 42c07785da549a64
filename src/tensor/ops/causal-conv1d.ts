/** Depthwise causal convolution with SiLU over packed sequences (docs/spec/language-model.md §2.2 step 2). */
import type { Parameter } from "../parameter.ts";
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

/**
 * p[t,c] = bias[c] + Σ_k weight[c,k] x[t - width + 1 + k, c], y = p σ(p); taps left of a sequence's first token are zero.
 * x_TC f32 or bf16, possibly a window of columns; weight_CK (a middle dimension of 1 is allowed), bias_C → y_TC
 * contiguous, of x's type.
 */
export function causalConv1d(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter, sequences: Sequences): Tensor {
	const { device } = tape;
	const channels = x.width;
	const width = weight.value.width;
	if (weight.value.elements !== channels * width || bias.value.elements !== channels) {
		throw new RangeError(
			`A convolution of ${channels} channels cannot take ${weight.name} [${weight.shape}] and ${bias.name} [${bias.shape}].`,
		);
	}
	if (weight.value.dtype !== bias.value.dtype) {
		throw new TypeError(`${weight.name} is ${weight.value.dtype}, ${bias.name} ${bias.value.dtype}.`);
	}
	if (x.rows !== sequences.tokens) {
		throw new RangeError(`Sequences of ${sequences.tokens} tokens do not describe ${x.rows} rows.`);
	}
	const y = tape.output(
		Tensor.empty(device, x.shape, x.dtype),
		x.gradient !== null || weight.trainable || bias.trainable,
	);
	const shared = {
		x,
		weight: weight.value,
		bias: bias.value,
		cu_seqlens: sequences.cuSeqlens,
		sequences: sequences.count,
		tokens: sequences.tokens,
		channels,
		width,
		x_stride: x.stride,
		dtype: x.dtypeCode,
		weight_dtype: weight.value.dtypeCode,
	};
	device.run("causal_conv1d_forward", { ...shared, y, y_stride: y.stride });
	tape.record({
		name: "causal_conv1d",
		outputs: [y],
		keep: [x, sequences.cuSeqlens],
		parameters: [weight, bias],
		backward: ([dy]) => {
			const dx = x.gradient?.target() ?? Tensor.empty(device, x.shape, x.dtype, "workspace");
			device.run("causal_conv1d_backward", {
				...shared,
				dy: dy!,
				dx,
				dweight: weight.mainGradient,
				dbias: bias.mainGradient,
				dy_stride: dy!.stride,
				dx_stride: dx.stride,
			});
			if (x.gradient) x.gradient.accumulate(dx);
			else dx[Symbol.dispose]();
		},
	});
	return y;
}
