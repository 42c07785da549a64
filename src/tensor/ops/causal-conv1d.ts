/** Depthwise causal convolution with SiLU over packed sequences (docs/spec/language-model.md §2.2 step 2). */
import { type ColumnMask, wantsGradient } from "../column-mask.ts";
import type { Parameter } from "../parameter.ts";
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";
import { MaskedValues } from "./mask-columns.ts";

/** Masks of the convolution's channels (docs/spec/elastic.md §9), a factor for every element of weight and bias. */
export interface ChannelMask {
	readonly weight: ColumnMask;
	readonly bias: ColumnMask;
}

/**
 * p[t,c] = bias[c] + Σ_k weight[c,k] x[t - width + 1 + k, c], y = p σ(p); taps left of a sequence's first token are zero.
 * x_TC f32 or bf16, possibly a window of columns; weight_CK (a middle dimension of 1 is allowed), bias_C → y_TC
 * contiguous, of x's type. Without a bias it is 0. With a mask, weight and bias are masked first.
 */
export function causalConv1d(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	bias: Parameter | null,
	sequences: Sequences,
	mask: ChannelMask | null = null,
): Tensor {
	const { device } = tape;
	const channels = x.width;
	const width = weight.value.width;
	check(x, weight, bias, sequences);
	const masked = mask && [new MaskedValues(weight, mask.weight), new MaskedValues(bias!, mask.bias)];
	const y = tape.output(
		Tensor.empty(device, x.shape, x.dtype),
		wantsGradient(x.gradient, mask && { columns: mask.weight, scale: null }) ||
			weight.trainable ||
			bias?.trainable === true,
	);
	const shared = {
		x,
		weight: masked?.[0]?.values ?? weight.value,
		bias: masked?.[1]?.values ?? bias?.value ?? null,
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
		own: masked ?? [],
		parameters: bias ? [weight, bias] : [weight],
		backward: ([dy]) => {
			const dx = x.gradient?.target() ?? Tensor.empty(device, x.shape, x.dtype, "workspace");
			const run = (dweight: Tensor | null, dbias: Tensor | null) =>
				device.run("causal_conv1d_backward", {
					...shared,
					dy: dy!,
					dx,
					dweight,
					dbias,
					dy_stride: dy!.stride,
					dx_stride: dx.stride,
				});
			if (masked === null) {
				run(weight.mainGradient, bias?.mainGradient ?? null);
			} else {
				using dweight = Tensor.zeros(device, weight.shape, "f32", "workspace");
				using dbias = Tensor.zeros(device, bias!.shape, "f32", "workspace");
				run(dweight, dbias);
				masked[0]!.addGradients(dweight);
				masked[1]!.addGradients(dbias);
			}
			if (x.gradient) x.gradient.accumulate(dx);
			else dx[Symbol.dispose]();
		},
	});
	return y;
}

function check(x: Tensor, weight: Parameter, bias: Parameter | null, sequences: Sequences): void {
	const width = bias?.value.elements ?? x.width;
	if (weight.value.elements !== x.width * weight.value.width || width !== x.width) {
		const shapes = [weight, ...(bias ? [bias] : [])].map(({ name, shape }) => `${name} [${shape}]`);
		throw new RangeError(`A convolution of ${x.width} channels cannot take ${shapes.join(" and ")}.`);
	}
	if (bias && weight.value.dtype !== bias.value.dtype) {
		throw new TypeError(`${weight.name} is ${weight.value.dtype}, ${bias.name} ${bias.value.dtype}.`);
	}
	if (x.rows !== sequences.tokens) {
		throw new RangeError(`Sequences of ${sequences.tokens} tokens do not describe ${x.rows} rows.`);
	}
}

// The depthwise causal convolution with SiLU one token further (docs/spec/language-model.md §2.2 step 2).

/**
 * y of the new token of S sequences. x_SC, possibly a window of columns; `window` [.., width − 1, C] of x's type holds the last
 * inputs of many sequences, oldest first, those of sequence s at slots[s]; they are shifted by the new input. → y_SC contiguous, of
 * x's type.
 */
export function causalConv1dStep(
	x: Tensor,
	weight: Parameter,
	bias: Parameter | null,
	window: Tensor,
	slots: Tensor,
): Tensor {
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
		bias: bias?.value ?? null,
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
