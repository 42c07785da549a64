/** Sinkhorn balancing of a router's choice (docs/spec/language-model.md §4.2): factors of experts that even out their tokens. */
import { Sequences } from "../sequences.ts";
import { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";
import { route } from "./router.ts";

/** Largest mean change of the factors that ends the iteration, and the addend of divisors; Megatron's constants. */
const tolerance = 1e-4;
const epsilon = 1e-8;

/**
 * log d_E, f32: the choice of a token's experts is the top-k of logits + log d. `tokens`: those of all ranks that share the
 * microbatch, of which logits_TE (f32) has this rank's; `sumOverRanks` adds up their columns in place. Waits for the device at every
 * iteration.
 */
export function sinkhornOffsets(
	logits: Tensor,
	{ tokens, sumOverRanks }: { readonly tokens: number; readonly sumOverRanks: (columns: Tensor) => void },
): Tensor {
	const { device, rows, width: experts } = logits;
	const tape = new Tape(device, { recording: false });
	using all = Sequences.of(device, [rows]);
	let factors = new Float32Array(experts).fill(1);
	for (let error = Number.POSITIVE_INFINITY; error > tolerance; ) {
		using bias = Tensor.from(device, factors.map(Math.log));
		using shifted = Tensor.empty(device, logits.shape);
		device.copy(shifted, logits, logits.bytes);
		const shape = { rows, groups: 1, width: experts, dtype: shifted.dtypeCode };
		device.run("grouped_bias_forward", { ...shape, offsets: null, factor: null, bias, y: shifted });
		using shares = route(tape, shifted, { topk: 1, scoreFunction: "softmax", preSoftmax: true, statistics: all });
		const { scoreSums } = shares.statistics!;
		sumOverRanks(scoreSums);
		const sums = scoreSums.toFloat32();
		// A share is d exp(logit) over its sum over experts, so the sums are those of Megatron's scaled rows, times d.
		const next = factors.map((factor, e) => 1 / (experts * (sums[e]! / (tokens * factor) + epsilon)));
		error = next.reduce((sum, value, e) => sum + Math.abs(value - factors[e]!), 0) / experts;
		factors = next;
	}
	return Tensor.from(device, factors.map(Math.log));
}
