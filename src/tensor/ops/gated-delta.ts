/** The gated delta rule of Gated DeltaNet over packed sequences (docs/spec/families.md §2.5 steps 3 to 5). */
import type { Parameter } from "../parameter.ts";
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type FloatDtype, Tensor } from "../tensor.ts";

export interface GatedDeltaInputs {
	/** Output of the convolution, columns q (H_k D_k) | k (H_k D_k) | v (H_v D_v); f32 or bf16. */
	readonly qkv: Tensor;
	/** Columns b (H_v) | a (H_v): strength of writing before the sigmoid, step size before bias and softplus; of qkv's type. */
	readonly ba: Tensor;
	/** [H_v], f32. */
	readonly dtBias: Parameter;
	/** [H_v], f32. */
	readonly aLog: Parameter;
	readonly sequences: Sequences;
	readonly keyHeads: number;
	readonly keyDim: number;
	readonly valueHeads: number;
	readonly valueDim: number;
	/** Receives the state after the last token of every sequence, [sequences, H_v, D_k, D_v] f32; default: not computed. */
	readonly finalState?: Tensor;
}

/**
 * q̂ = q / √(Σ q² + 1e-6) D_k^-½, k̂ = k / √(Σ k² + 1e-6), β = σ(b), g = -exp(A_log) softplus(a + dt_bias); from zero in every
 * sequence S̃ = exp(g_t) S_{t-1}, S_t = S̃ + k̂_t (β_t (v_t - S̃ᵀ k̂_t))ᵀ, o_t = S_tᵀ q̂_t. Value head j reads key head ⌊j H_k / H_v⌋.
 * Inputs may be windows of columns. → o, a row for every value head of a token, [T H_v, D_v], contiguous, of qkv's type.
 */
export function gatedDelta(tape: Tape, inputs: GatedDeltaInputs): Tensor {
	const { device } = tape;
	const { qkv, ba, dtBias, aLog, sequences, valueHeads, valueDim } = inputs;
	check(inputs, sequences.tokens);
	if (inputs.finalState && inputs.finalState.elements !== sequences.count * stateElements(inputs)) {
		throw new RangeError(`[${inputs.finalState.shape}] does not hold the states of ${sequences.count} sequences.`);
	}
	const trains = [qkv, ba].some(({ gradient }) => gradient !== null) || dtBias.trainable || aLog.trainable;
	const o = tape.output(Tensor.empty(device, [qkv.rows * valueHeads, valueDim], qkv.dtype as FloatDtype), trains);
	const shared = {
		...sharedArguments(inputs),
		cu_seqlens: sequences.cuSeqlens,
		sequences: sequences.count,
		tokens: sequences.tokens,
	};
	{
		using parts = windowsOf(inputs);
		device.run("gated_delta_forward", { ...shared, ...parts.of, o, final_state: inputs.finalState ?? null });
	}
	tape.record({
		name: "gated_delta",
		outputs: [o],
		keep: [qkv, ba, sequences.cuSeqlens],
		parameters: [dtBias, aLog],
		backward: ([gradient]) => {
			using dO = contiguous(gradient!);
			const target = (x: Tensor) => x.gradient?.target() ?? Tensor.empty(device, x.shape, x.dtype, "workspace");
			const [dqkv, dba] = [target(qkv), target(ba)];
			using values = windowsOf(inputs);
			using gradients = windowsOf({ ...inputs, qkv: dqkv, ba: dba });
			const { q: dq, k: dk, v: dv, b: db, a: da } = gradients.of;
			device.run("gated_delta_backward", {
				...{ ...shared, ...values.of, d_o: dO, dq, dk, dv, db, da },
				...{ ddt_bias: dtBias.mainGradient, da_log: aLog.mainGradient },
				...{ dqkv_stride: dqkv.stride, dba_stride: dba.stride },
			});
			for (const [x, dx] of [
				[qkv, dqkv],
				[ba, dba],
			] as const) {
				if (x.gradient) x.gradient.accumulate(dx);
				else dx[Symbol.dispose]();
			}
		},
	});
	return o;
}

type Sizes = Pick<GatedDeltaInputs, "keyHeads" | "keyDim" | "valueHeads" | "valueDim">;

/** Elements of a sequence's state. */
export function stateElements({ keyDim, valueHeads, valueDim }: Sizes): number {
	return valueHeads * keyDim * valueDim;
}

/** The windows q, k, v of the convolution's columns and b, a of the projection's, or of their gradients'. */
function windowsOf({ qkv, ba, keyHeads, keyDim, valueHeads, valueDim }: Omit<GatedDeltaInputs, "sequences">) {
	const [keys, values] = [keyHeads * keyDim, valueHeads * valueDim];
	const of = {
		q: qkv.columns(0, keys),
		k: qkv.columns(keys, keys),
		v: qkv.columns(2 * keys, values),
		b: ba.columns(0, valueHeads),
		a: ba.columns(valueHeads, valueHeads),
	};
	return {
		of,
		[Symbol.dispose]() {
			for (const window of Object.values(of)) window[Symbol.dispose]();
		},
	};
}

/** Arguments that all three operations have. */
function sharedArguments(inputs: Omit<GatedDeltaInputs, "sequences">) {
	return {
		dt_bias: inputs.dtBias.value,
		a_log: inputs.aLog.value,
		key_heads: inputs.keyHeads,
		value_heads: inputs.valueHeads,
		key_dim: inputs.keyDim,
		value_dim: inputs.valueDim,
		qkv_stride: inputs.qkv.stride,
		ba_stride: inputs.ba.stride,
		dtype: inputs.qkv.dtypeCode,
	};
}

function check(inputs: Omit<GatedDeltaInputs, "sequences">, tokens: number): void {
	const { qkv, ba, dtBias, aLog, keyHeads, keyDim, valueHeads, valueDim } = inputs;
	if (keyHeads < 1 || valueHeads % keyHeads !== 0) {
		throw new RangeError(`${valueHeads} value heads are no multiple of ${keyHeads} key heads.`);
	}
	const widths = { qkv: 2 * keyHeads * keyDim + valueHeads * valueDim, ba: 2 * valueHeads };
	for (const [name, x] of Object.entries({ qkv, ba })) {
		const width = widths[name as keyof typeof widths];
		if (x.width !== width || x.rows !== tokens || x.dtype !== qkv.dtype) {
			throw new RangeError(
				`The delta rule takes ${name} as ${qkv.dtype} [${tokens}, ${width}], not ${x.dtype} [${x.shape}].`,
			);
		}
	}
	for (const { name, value } of [dtBias, aLog]) {
		if (value.elements !== valueHeads || value.dtype !== "f32") {
			throw new RangeError(`The delta rule takes ${name} as f32 [${valueHeads}], not ${value.dtype} [${value.shape}].`);
		}
	}
}

/**
 * The output of gatedDelta for the new token of S sequences: inputs of S rows. `state` [.., H_v, D_k, D_v] f32 holds the states of
 * many sequences, as a final state; the state of sequence s, at slots[s], is updated. → o, [S H_v, D_v], of qkv's type.
 */
export function gatedDeltaStep(
	inputs: Omit<GatedDeltaInputs, "sequences" | "finalState">,
	state: Tensor,
	slots: Tensor,
): Tensor {
	const { qkv, valueHeads, valueDim } = inputs;
	check(inputs, qkv.rows);
	if (slots.elements !== qkv.rows || state.elements % stateElements(inputs) !== 0) {
		throw new RangeError(
			`A step of ${qkv.rows} sequences cannot take slots [${slots.shape}], states [${state.shape}].`,
		);
	}
	const o = Tensor.empty(qkv.device, [qkv.rows * valueHeads, valueDim], qkv.dtype);
	using parts = windowsOf(inputs);
	qkv.device.run("gated_delta_step", {
		...sharedArguments(inputs),
		...{ ...parts.of, state, slots, o, sequences: qkv.rows },
	});
	return o;
}
