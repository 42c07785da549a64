/** Parts of a layer that selective recomputation (--recompute-modules) can recompute. */
import type { RecomputeModule } from "../../config/recompute-modules.ts";
import { gatherSequence } from "../../parallel/index.ts";
import { type Computation, Recomputed, type ResidualSum, type Tape, type Tensor } from "../../tensor/index.ts";
import type { HybridConfig } from "./config.ts";
import type { LayerContext } from "./layer-context.ts";
import { norm } from "./norm.ts";

/** The output of such a part. */
export interface ModuleOutput extends Disposable {
	readonly y: Tensor;
	/**
	 * To be called when every forward reader of y has been recorded: frees y's memory if the part is recomputed
	 * (Recomputed.drop).
	 */
	drop(): void;
}

/** Whether this forward pass discards the part's activations; the recomputing forward keeps them. */
export function isRecomputed(tape: Tape, { recompute }: HybridConfig, module: RecomputeModule): boolean {
	return (
		tape.recording && !tape.replaying && recompute?.granularity === "selective" && recompute.modules.includes(module)
	);
}

/** compute(tape, inputs), recomputed if the configuration names the part. */
export function runModule(
	tape: Tape,
	config: HybridConfig,
	module: RecomputeModule,
	inputs: readonly Tensor[],
	compute: Computation,
): ModuleOutput {
	if (isRecomputed(tape, config, module)) return new Recomputed(tape, inputs, compute);
	return kept(compute(tape, ...inputs));
}

/**
 * A layer's input norm of this rank's tokens, masked for an elastic model: u_(T/tp)H. It writes the residual sum x; recomputed,
 * it reads x.
 */
export function normed(tape: Tape, context: LayerContext, x: ResidualSum, weight: string): ModuleOutput {
	const { config, masks } = context;
	const options = { mask: masks?.norm ?? null, columns: masks?.hidden ?? null, sum: x };
	const u = runModule(tape, config, "layernorm", [x.tensor], (on, value) => norm(on, context, value, weight, options));
	context.probe("normed")?.(u.y);
	return u;
}

/** All-gathers the normed tokens, u_TH. The gathering is recomputed with the norm, since its backward needs no copy of u. */
export function everyRanksTokens(tape: Tape, { config, parallel: { tp } }: LayerContext, u: Tensor): ModuleOutput {
	if (tp.size === 1) return kept(u.share());
	return runModule(tape, config, "layernorm", [u], (on, own) => gatherSequence(on, own, tp));
}

function kept(y: Tensor): ModuleOutput {
	return { y, drop() {}, [Symbol.dispose]: () => y[Symbol.dispose]() };
}
