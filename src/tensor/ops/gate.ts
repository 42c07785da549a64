/** Gates of outputs (docs/spec/families.md §2.3, §2.5 step 6). */
import { Gate, type GateName } from "../../native/abi.ts";
import type { Tape } from "../tape.ts";
import { axpby, contiguous, copyInto, type FloatDtype, Tensor } from "../tensor.ts";
import type { AttentionHeads } from "./attention.ts";

/**
 * y = x σ(gate), or x gate σ(gate) by `silu`, in fp32 with one rounding. gate_RW, possibly a window of columns, and x contiguous, of
 * as many elements in rows of any width; f32 or bf16 → y_RW contiguous.
 */
export function gated(tape: Tape, x: Tensor, gate: Tensor, kind: GateName): Tensor {
	const { device } = tape;
	const { rows, width } = gate;
	if (!x.contiguous || gate.elements !== x.elements || gate.dtype !== x.dtype) {
		throw new RangeError(`A gate of ${gate.dtype} [${gate.shape}] does not fit ${x.dtype} [${x.shape}].`);
	}
	const wanted = x.gradient !== null || gate.gradient !== null;
	const y = tape.output(Tensor.empty(device, [rows, width], x.dtype as FloatDtype), wanted);
	const shared = {
		...{ x, gate, rows, width, x_stride: width, gate_stride: gate.stride },
		...{ kind: Gate[kind], dtype: x.dtypeCode },
	};
	device.run("gate_forward", { ...shared, y, y_stride: width });
	tape.record({
		name: "gate",
		outputs: [y],
		keep: [x, gate],
		backward: ([dy]) => {
			const temporary = (of: Tensor) => Tensor.empty(device, of.shape, of.dtype, "workspace");
			const dx = x.gradient?.contiguousTarget() ?? temporary(x);
			const dgate = gate.gradient?.target() ?? temporary(gate);
			const strides = { dy_stride: dy!.stride, dx_stride: width, dgate_stride: dgate.stride };
			device.run("gate_backward", { ...shared, ...strides, dy: dy!, dx, dgate });
			for (const [of, gradient] of [
				[x, dx],
				[gate, dgate],
			] as const) {
				if (of.gradient) of.gradient.accumulate(gradient);
				else gradient[Symbol.dispose]();
			}
		},
	});
	return y;
}

/**
 * The gates of attention's output out of a fused projection: fused_T((2nq+2ng)d), per key head its queries, their gates, k, v,
 * contiguous → qkv_T((nq+2ng)d), per key head [q … q, k, v], and gate_T(nq d). Backward: both gradients side by side again.
 */
export function splitGate(
	tape: Tape,
	fused: Tensor,
	{ queryHeads, keyHeads, headDim: d }: AttentionHeads,
): [Tensor, Tensor] {
	const { device } = tape;
	const queries = (queryHeads / keyHeads) * d;
	if (!fused.contiguous || fused.width !== keyHeads * (2 * queries + 2 * d)) {
		throw new RangeError(`[${fused.shape}] does not hold ${queryHeads} gated query heads and ${keyHeads} key heads.`);
	}
	const make = (width: number) => Tensor.empty(device, [fused.rows, keyHeads * width], fused.dtype as FloatDtype);
	const wanted = fused.gradient !== null;
	const qkv = tape.output(make(queries + 2 * d), wanted);
	const gate = tape.output(make(queries), wanted);
	/** Copies the columns that the whole and a part share, of every key head. */
	const copy = (whole: Tensor, ofQkv: Tensor | null, ofGate: Tensor | null, towards: "parts" | "whole") => {
		for (const [part, at, from, count] of [
			[ofQkv, 0, 0, queries],
			[ofGate, 0, queries, queries],
			[ofQkv, queries, 2 * queries, 2 * d],
		] as const) {
			using groups = byKeyHead(whole, keyHeads);
			using inWhole = groups.columns(from, count);
			if (part === null) {
				axpby(inWhole, inWhole, 0, 0);
				continue;
			}
			using ofPart = byKeyHead(part, keyHeads);
			using inPart = ofPart.columns(at, count);
			if (towards === "parts") copyInto(inWhole, inPart);
			else copyInto(inPart, inWhole);
		}
	};
	copy(fused, qkv, gate, "parts");
	tape.record({
		name: "split_gate",
		outputs: [qkv, gate],
		backward: ([dqkv, dgate]) => {
			if (fused.gradient === null) return;
			const dfused = fused.gradient.contiguousTarget();
			using first = dqkv && contiguous(dqkv);
			using second = dgate && contiguous(dgate);
			copy(dfused, first ?? null, second ?? null, "whole");
			fused.gradient.accumulate(dfused);
		},
	});
	return [qkv, gate];
}

/** A row for every key head of a token. */
function byKeyHead(x: Tensor, keyHeads: number): Tensor {
	return x.view([x.rows * keyHeads, x.width / keyHeads]);
}
