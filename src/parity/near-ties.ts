/**
 * Near ties in routing. Two scores closer than fp32 rounding are ordered differently on another processor, after which two
 * correct runs diverge. A comparison with a reference finds near ties and, if a step is off, may decide them as the reference
 * did: either the values agree again, or the difference has another cause.
 */
import type { RouterState } from "../models/language/router-state.ts";
import { axpby, Tensor } from "../tensor/index.ts";

/**
 * Scores closer than this may be ordered either way. fp32 rounding moves a logit by up to 1e-5 after 30 steps, its sigmoid by at
 * most a quarter of that, and the difference of two by half.
 */
const nearby = 5e-6;

/** A token's k-th expert and the next one. */
export interface NearTie {
	readonly rank: number;
	/** From 0. */
	readonly step: number;
	readonly layer: number;
	/** Number of the layer's forward pass in this step, from 0. */
	readonly pass: number;
	/** Among this rank's tokens of the pass. */
	readonly token: number;
	readonly chosen: number;
	readonly leftOut: number;
	/** Difference of their scores; of expert choice with the bias added, of the balancing loss's without. */
	readonly gap: number;
}

/** Finds the near ties of a run on one rank. */
export class NearTies {
	readonly found: NearTie[] = [];
	#step = 0;
	readonly #passes = new Map<number, number>();

	/** `swapped`: near ties of an equal earlier run, to be decided the other way. */
	constructor(
		readonly rank: number,
		readonly swapped: readonly NearTie[],
	) {}

	watch(routers: ReadonlyMap<number, RouterState>): void {
		for (const [layer, router] of routers) router.onLogits = (logits) => this.#examine(layer, router, logits);
	}

	startStep(step: number): void {
		this.#step = step;
		this.#passes.clear();
	}

	#examine(layer: number, router: RouterState, logits: Tensor): void {
		const pass = this.#passes.get(layer) ?? 0;
		this.#passes.set(layer, pass + 1);
		const { topk, experts, groups, scoreFunction } = router.moe;
		// Group limits choose between groups first: their near ties are not looked for.
		if (groups > 1 || topk >= experts) return;
		const values = logits.toFloat32();
		const score = scoreFunction === "sigmoid" ? (x: number) => 1 / (1 + Math.exp(-x)) : (x: number) => x;
		const bias = router.moe.expertBias ? router.expertBias.toFloat32() : new Float32Array(experts);
		const place = { rank: this.rank, step: this.#step, layer, pass };
		let changed = false;
		for (let token = 0; token < logits.rows; token++) {
			const own = values.subarray(token * experts, (token + 1) * experts);
			const plain = Float64Array.from(own, score);
			for (const keys of [plain.map((value, expert) => value + bias[expert]!), plain]) {
				const tie = { ...place, token, ...boundary(keys, topk) };
				if (tie.gap >= nearby) continue;
				if (!this.swapped.some((other) => isSame(tie, other))) {
					this.found.push(tie);
					continue;
				}
				raise(own, tie, (expert, logit) => score(logit) + keys[expert]! - plain[expert]!);
				changed = true;
			}
		}
		if (!changed) return;
		using raised = Tensor.from(logits.device, values, logits.shape);
		axpby(raised, logits, 1, 0);
	}
}

/** The k-th best and the next one; ties go to the lower index. */
function boundary(keys: Float64Array, k: number): Pick<NearTie, "chosen" | "leftOut" | "gap"> {
	const order = Array.from(keys, (_, expert) => expert).sort((a, b) => keys[b]! - keys[a]! || a - b);
	const [chosen, leftOut] = [order[k - 1]!, order[k]!];
	return { chosen, leftOut, gap: keys[chosen]! - keys[leftOut]! };
}

/** Whether swapping one swaps the other: gaps differ between the choice of experts and the balancing loss. */
export function isSame(a: NearTie, b: NearTie): boolean {
	return (["rank", "step", "layer", "pass", "token", "chosen", "leftOut"] as const).every((key) => a[key] === b[key]);
}

/** Raises the left-out expert's logit just past the chosen one: by about the gap, less than rounding moves it. */
function raise(logits: Float32Array, { chosen, leftOut }: NearTie, key: (expert: number, logit: number) => number) {
	const start = logits[leftOut]!;
	const goal = key(chosen, logits[chosen]!);
	for (let by = 1e-8; key(leftOut, logits[leftOut]!) <= goal; by *= 1.5) logits[leftOut] = start + by;
}

/** A sentence for people. */
export function describeTie({ rank, step, layer, pass, token, chosen, leftOut, gap }: NearTie): string {
	return `step ${step + 1}, layer ${layer}, token ${token} of pass ${pass} on rank ${rank}: expert ${leftOut} rather than ${chosen}, whose scores differ by ${gap.toExponential(1)}`;
}
