/** The depthwise causal convolution with SiLU one token further (docs/spec/language-model.md §2.2 step 2). */
import type { Parameter } from "../parameter.ts";
import { Tensor } from "../tensor.ts";

/**
 * y of the new token of S sequences. x_SC, possibly a window of columns; `window` [.., width − 1, C] of x's type holds the last
 * inputs of many sequences, oldest first, those of sequence s at slots[s]; they are shifted by the new input. → y_SC contiguous, of
 * x's type.
 */
export function causalConv1dStep(x: Tensor, weight: Parameter, bias: Parameter, window: Tensor, slots: Tensor): Tensor {
	const { device } = x;
	const channels = x.width;
	const width = weight.value.width;
	if (weight.value.elements !== channels * width || window.width !== channels || window.dtype !== x.dtype) {
		throw new RangeError(
			`A step of ${channels} channels cannot take ${weight.name} [${weight.shape}] and [${window.shape}].`,
		);
	}
	const y = Tensor.empty(device, x.shape, x.dtype);
	device.run("causal_conv1d_step", {
		x,
		weight: weight.value,
		bias: bias.value,
		state: window,
		slots,
		y,
		sequences: x.rows,
		channels,
		width,
		x_stride: x.stride,
		y_stride: y.stride,
		dtype: x.dtypeCode,
		weight_dtype: weight.value.dtypeCode,
	});
	return y;
}
