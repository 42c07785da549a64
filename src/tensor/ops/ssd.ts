/** Mamba-2's state space scan with its gate, over packed sequences (docs/spec/language-model.md §2.2 steps 3 to 6). */
import { type ColumnMask, maskArguments, maskGradients, maskTensors, wantsGradient } from "../column-mask.ts";
import type { Parameter } from "../parameter.ts";
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

export interface SsdInputs {
	/** Output of the convolution, columns x (H P) | B (G N) | C (G N); f32 or bf16. */
	readonly xBC: Tensor;
	/** Gate, [T, H P], of xBC's type. */
	readonly z: Tensor;
	/** Step size before bias and softplus, [T, H], of xBC's type. */
	readonly dt: Tensor;
	/** [H], f32. */
	readonly dtBias: Parameter;
	/** [H], f32. */
	readonly aLog: Parameter;
	/** [H], f32. */
	readonly d: Parameter;
	readonly sequences: Sequences;
	readonly heads: number;
	readonly headDim: number;
	readonly groups: number;
	readonly stateDim: number;
	/** Tokens of a chunk of the scan; it changes results by rounding only. */
	readonly chunkSize: number;
	/** Δ is at least this; default 0, no limit (Hugging Face's plain PyTorch path: time_step_min). */
	readonly dtMinimum?: number;
	/** Multiplies the columns of z (docs/spec/elastic.md §9). */
	readonly zMask?: ColumnMask | null;
	/** Receives the state after the last token of every sequence, [sequences, H, P, N] f32; default: not computed. */
	readonly finalState?: Tensor;
}

/**
 * Δ = max(softplus(dt + dt_bias), dtMinimum), a = -exp(A_log) Δ; h_t = exp(a_t) h_{t-1} + Δ_t x_t ⊗ B_t from zero in every sequence;
 * y_t = h_t C_t + D x_t; o = y silu(zMask z). Head j reads group ⌊j G / H⌋ of B and C. Inputs may be windows of columns.
 * → o_T(HP), contiguous, of xBC's type.
 */
export function ssdScan(tape: Tape, inputs: SsdInputs): Tensor {
	const { device } = tape;
	const { xBC, z, dt, dtBias, aLog, d, sequences } = inputs;
	check(inputs);
	const zMask = { columns: inputs.zMask ?? null, scale: null };
	const wanted =
		wantsGradient(z.gradient, zMask) ||
		[xBC, dt].some((tensor) => tensor.gradient !== null) ||
		[dtBias, aLog, d].some((weight) => weight.trainable);
	const o = tape.output(Tensor.empty(device, z.shape, xBC.dtype), wanted);
	const y = tape.recording && wanted ? Tensor.empty(device, z.shape, xBC.dtype) : null;
	const shared = {
		...sharedArguments(inputs),
		...{ cu_seqlens: sequences.cuSeqlens, sequences: sequences.count, tokens: sequences.tokens },
		...{ chunk_size: inputs.chunkSize, z_factors: maskArguments(zMask, z.width).factors, y },
	};
	{
		using windows = windowsOf(xBC, inputs);
		const { x, b, c } = windows;
		device.run("ssd_forward", { ...shared, x, b, c, o, final_state: inputs.finalState ?? null });
	}
	tape.record({
		name: "ssd",
		outputs: [o],
		keep: [xBC, z, dt, sequences.cuSeqlens, ...maskTensors(zMask)],
		own: [y],
		parameters: [dtBias, aLog, d],
		backward: ([gradient]) => {
			using dO = contiguous(gradient!);
			const target = (tensor: Tensor) =>
				tensor.gradient?.target() ?? Tensor.empty(device, tensor.shape, tensor.dtype, "workspace");
			const [dxBC, dz, ddt] = [target(xBC), target(z), target(dt)];
			using values = windowsOf(xBC, inputs);
			using gradients = windowsOf(dxBC, inputs);
			device.run("ssd_backward", {
				...shared,
				d_o: dO,
				x: values.x,
				b: values.b,
				c: values.c,
				y: y!,
				dx: gradients.x,
				db: gradients.b,
				dc: gradients.c,
				dz,
				ddt,
				ddt_bias: dtBias.mainGradient,
				da_log: aLog.mainGradient,
				dd: d.mainGradient,
				dz_factors: maskGradients(zMask).dfactors,
				dxbc_stride: dxBC.stride,
				dz_stride: dz.stride,
				ddt_stride: ddt.stride,
			});
			for (const [tensor, dtensor] of [
				[xBC, dxBC],
				[z, dz],
				[dt, ddt],
			] as const) {
				if (tensor.gradient) tensor.gradient.accumulate(dtensor);
				else dtensor[Symbol.dispose]();
			}
		},
	});
	return o;
}

/** The windows x, B and C of the convolution's columns, or of their gradient's. */
function windowsOf(xBC: Tensor, { heads, headDim, groups, stateDim }: Omit<SsdInputs, "sequences">) {
	const [inner, state] = [heads * headDim, groups * stateDim];
	const x = xBC.columns(0, inner);
	const b = xBC.columns(inner, state);
	const c = xBC.columns(inner + state, state);
	return {
		x,
		b,
		c,
		[Symbol.dispose]() {
			for (const window of [x, b, c]) window[Symbol.dispose]();
		},
	};
}

/** Arguments that a scan's directions and a step have. */
function sharedArguments(inputs: Omit<SsdInputs, "sequences">) {
	const { xBC, z, dt } = inputs;
	return {
		z,
		dt,
		dt_bias: inputs.dtBias.value,
		a_log: inputs.aLog.value,
		d: inputs.d.value,
		heads: inputs.heads,
		head_dim: inputs.headDim,
		groups: inputs.groups,
		state_dim: inputs.stateDim,
		xbc_stride: xBC.stride,
		z_stride: z.stride,
		dt_stride: dt.stride,
		dt_minimum: inputs.dtMinimum ?? 0,
		dtype: xBC.dtypeCode,
	};
}

function check(inputs: SsdInputs): void {
	const { xBC, z, dt, sequences, heads, headDim, groups, stateDim, chunkSize, finalState } = inputs;
	if (groups < 1 || heads % groups !== 0) throw new RangeError(`${heads} heads do not fall into ${groups} groups.`);
	if (chunkSize < 1) throw new RangeError(`A scan in chunks of ${chunkSize} tokens is not possible.`);
	const widths = { xBC: heads * headDim + 2 * groups * stateDim, z: heads * headDim, dt: heads };
	for (const [name, tensor] of Object.entries({ xBC, z, dt })) {
		const width = widths[name as keyof typeof widths];
		if (tensor.width !== width || tensor.rows !== sequences.tokens || tensor.dtype !== xBC.dtype) {
			throw new RangeError(
				`The scan takes ${name} as ${xBC.dtype} [${sequences.tokens}, ${width}], not ${tensor.dtype} [${tensor.shape}].`,
			);
		}
	}
	if (finalState && finalState.elements !== sequences.count * heads * headDim * stateDim) {
		throw new RangeError(`[${finalState.shape}] does not hold the states of ${sequences.count} sequences.`);
	}
	for (const { name, value } of [inputs.dtBias, inputs.aLog, inputs.d]) {
		if (value.elements !== heads || value.dtype !== "f32") {
			throw new RangeError(`The scan takes ${name} as f32 [${heads}], not ${value.dtype} [${value.shape}].`);
		}
	}
}

// Mamba-2's state space scan with its gate, one token further (docs/spec/language-model.md §2.2 steps 3 to 6).

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
	using windows = windowsOf(xBC, inputs);
	const { x, b, c } = windows;
	device.run("ssd_step", { ...sharedArguments(inputs), x, b, c, state, slots, o, sequences: xBC.rows });
	return o;
}
