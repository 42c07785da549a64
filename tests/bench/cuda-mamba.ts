/** The Mamba layer's convolution and scan at the sizes of a 20-layer Nemotron model. */
import { Dtype } from "../../src/native/abi.ts";
import type { Tensor } from "../../src/tensor/tensor.ts";
import { type Case, fromColumn, type Tensors, tokens } from "./cuda-case.ts";

const bf16 = Dtype.bf16;

export function mambaCases(x: Tensors): Case[] {
	const { device } = x;
	const [heads, headDim, groups, stateDim, channels] = [64, 64, 8, 128, 6144];
	const inner = heads * headDim;
	const [xbc, dxbc] = [x.random([tokens, channels]), x.random([tokens, channels])];
	const [z, o, y, dz] = [0, 1, 2, 3].map(() => x.random([tokens, inner])) as [Tensor, Tensor, Tensor, Tensor];
	const [dt, ddt] = [x.random([tokens, heads]), x.random([tokens, heads])];
	const [bias, aLog, d] = [0, 1, 2].map(() => x.random([heads], "f32", 0.1)) as [Tensor, Tensor, Tensor];
	const cu = x.integers(Int32Array.of(0, tokens));
	const scan = {
		x: xbc,
		b: fromColumn(xbc, inner),
		c: fromColumn(xbc, inner + groups * stateDim),
		z,
		dt,
		dt_bias: bias,
		a_log: aLog,
		d,
		z_factors: null,
		y,
		cu_seqlens: cu,
		sequences: 1,
		tokens,
		heads,
		head_dim: headDim,
		groups,
		state_dim: stateDim,
		chunk_size: 128,
		xbc_stride: channels,
		z_stride: inner,
		dt_stride: heads,
		dt_minimum: 0,
		dtype: bf16,
	};
	const dxconv = x.random([tokens, channels]);
	const [weight, cbias] = [x.random([channels, 4]), x.random([channels])];
	const [dweight, dbias] = [x.random([channels, 4], "f32"), x.random([channels], "f32")];
	const conv = {
		x: xbc,
		weight,
		bias: cbias,
		cu_seqlens: cu,
		sequences: 1,
		tokens,
		channels,
		width: 4,
		x_stride: channels,
		dtype: bf16,
		weight_dtype: bf16,
	};
	const shape = `${tokens}, ${heads} heads of ${headDim}, state ${stateDim}, ${groups} groups`;
	return [
		{
			operation: "conv1d and SiLU",
			shape: `${tokens} x ${channels}`,
			work: 4 * tokens * channels,
			unit: "TB/s",
			run: () => device.run("causal_conv1d_forward", { ...conv, y: dxbc, y_stride: channels }),
		},
		{
			operation: "conv1d and SiLU backward",
			shape: `${tokens} x ${channels}`,
			work: 6 * tokens * channels,
			unit: "TB/s",
			run: () =>
				device.run("causal_conv1d_backward", {
					...conv,
					dy: dxbc,
					dx: dxconv,
					dweight,
					dbias,
					dy_stride: channels,
					dx_stride: channels,
				}),
		},
		{
			operation: "SSD scan",
			shape,
			work: 2 * tokens * (channels + 3 * inner),
			unit: "TB/s",
			run: () => device.run("ssd_forward", { ...scan, o, final_state: null }),
		},
		{
			operation: "SSD scan backward",
			shape,
			work: 2 * tokens * (2 * channels + 4 * inner),
			unit: "TB/s",
			run: () =>
				device.run("ssd_backward", {
					...scan,
					d_o: o,
					dx: dxbc,
					db: fromColumn(dxbc, inner),
					dc: fromColumn(dxbc, inner + groups * stateDim),
					dz,
					ddt,
					ddt_bias: bias,
					da_log: aLog,
					dd: d,
					dz_factors: null,
					dxbc_stride: channels,
					dz_stride: inner,
					ddt_stride: heads,
				}),
		},
	];
}
