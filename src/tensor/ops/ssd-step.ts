/** Mamba-2's state space scan with its gate, one token further (docs/spec/language-model.md §2.2 steps 3 to 6). */
import { Tensor } from "../tensor.ts";
import type { SsdInputs } from "./ssd.ts";

/**
 * The output of ssdScan for the new token of S sequences: inputs of S rows. `state` [.., H, P, N] f32 holds the states of many
 * sequences, as a scan's finalState; the state of sequence s, at slots[s], is updated. → o_S(HP), of xBC's type.
 */
export function ssdStep(
	inputs: Omit<SsdInputs, "sequences" | "finalState" | "zMask">,
	state: Tensor,
	slots: Tensor,
): Tensor {
	const { xBC, z, dt, heads, headDim, groups, stateDim } = inputs;
	const { device } = xBC;
	const inner = heads * headDim;
	const width = groups * stateDim;
	if (xBC.width !== inner + 2 * width || z.width !== inner || dt.width !== heads || state.width !== stateDim) {
		throw new RangeError(
			`A step of ${heads} heads cannot take [${xBC.shape}], [${z.shape}], [${dt.shape}], [${state.shape}].`,
		);
	}
	const o = Tensor.empty(device, z.shape, xBC.dtype);
	using x = xBC.columns(0, inner);
	using b = xBC.columns(inner, width);
	using c = xBC.columns(inner + width, width);
	device.run("ssd_step", {
		x,
		b,
		c,
		z,
		dt,
		dt_bias: inputs.dtBias.value,
		a_log: inputs.aLog.value,
		d: inputs.d.value,
		state,
		slots,
		o,
		sequences: xBC.rows,
		heads,
		head_dim: headDim,
		groups,
		state_dim: stateDim,
		xbc_stride: xBC.stride,
		z_stride: z.stride,
		dt_stride: dt.stride,
		dt_minimum: inputs.dtMinimum ?? 0,
		dtype: xBC.dtypeCode,
	});
	return o;
}
