/**
 * Compares a training with its reference step by step. If a step is off, near ties of its routing are flipped one at a time, from
 * the tie's step on, and the first flip that makes every value agree is kept.
 */
import type { RouterState } from "../models/language/router-state.ts";
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/index.ts";
import { axpby, Tensor } from "../tensor/index.ts";
import type { TrainingState } from "../train/step-state.ts";
import { bf16Report, type Check, holds, type ParityReport, type Precision } from "./comparison.ts";
import { reduceHost } from "./probe-sums.ts";

/** Every rank's values, in rank order; each gives equally many. */
export type Gather = (own: Float64Array) => Float64Array;

/** A training on one rank that can be rolled back. */
export interface ComparedRun {
	readonly folder: string;
	readonly steps: number;
	/** In a bf16 run only losses are compared, without a search for near ties. */
	readonly precision: Precision;
	readonly state: Trained;
	/** Routers by layer; empty on a rank of the encoder. */
	readonly routers: ReadonlyMap<number, RouterState>;
	/** Trains step `step`, counted from 0, and compares it. */
	step(step: number): Check[];
}

/** Near ties of a rank and step that the search tries at most, the closest first. */
const mostTies = 8;
/** Snapshots are kept of the latest `spacing` steps, and of every `spacing`-th step before them. */
const spacing = 4;

interface TrainedStep {
	/** The state before the step; null: no longer kept. */
	snapshot: Snapshot | null;
	readonly checks: readonly Check[];
	readonly found: readonly NearTie[];
}

/**
 * Every rank of the world calls this together. A search for near ties trains at most as many steps again as the whole
 * run has, so a difference with another cause is reported in twice the time of a run that agrees.
 */
export function compareSteps(rank: number, gather: Gather, run: ComparedRun): ParityReport {
	const swapped: NearTie[] = [];
	const done: TrainedStep[] = [];
	let search: ParityReport["search"];
	const agree = (checks: readonly Check[]) =>
		gather(Float64Array.of(checks.every(holds) ? 0 : 1)).every((value) => value === 0);
	const train = (step: number, ties: readonly NearTie[]): TrainedStep => {
		const snapshot = run.precision === "f32" && !search ? new Snapshot(run.state) : null;
		const watch = new NearTies(rank, ties);
		watch.watch(run.routers);
		watch.startStep(step);
		return { snapshot, checks: run.step(step), found: watch.found };
	};

	/** Trains again up to the last step done with `tie` decided the other way too; null where a value is off then. */
	const attempt = (tie: NearTie, from: number): TrainedStep[] | null => {
		done[from]!.snapshot!.restore();
		const trial: TrainedStep[] = [];
		for (let step = from; step < done.length; step++) {
			trial.push(train(step, [...swapped, tie]));
			if (!agree(trial.at(-1)!.checks)) return null;
		}
		return trial;
	};

	/** Swaps the near tie that explains that the last step is off, if there is one. */
	const resolve = (): void => {
		const after = new Snapshot(run.state);
		let left = run.steps;
		let tried = 0;
		const candidates = candidatesOf(done, gather);
		for (const tie of candidates) {
			const from = lastSnapshot(done, tie.step);
			left -= done.length - from;
			if (left < 0) break;
			tried++;
			const trial = attempt(tie, from);
			if (trial === null) continue;
			swapped.push(tie);
			done.splice(from, trial.length, ...trial);
			return;
		}
		search = { tried, untried: candidates.length - tried };
		after.restore();
	};

	for (let step = 0; step < run.steps; step++) {
		done.push(train(step, swapped));
		const old = done[step - spacing];
		if (old && (step - spacing) % spacing !== 0) old.snapshot = null;
		// Behind an unexplained difference later steps may differ too: they are trained once, for the report, without a search.
		if (run.precision === "f32" && !search && !agree(done[step]!.checks)) resolve();
	}
	const report = {
		folder: run.folder,
		checks: done.flatMap(({ checks }) => checks),
		...(swapped.length > 0 && { ties: swapped.map(describeTie) }),
		...(search && { search }),
	};
	return run.precision === "bf16" ? bf16Report(report) : report;
}

/** All values side by side through the group's sum. */
export function gatherOver(group: Group, device: Device): Gather {
	return (own) => {
		const all = new Float64Array(group.size * own.length);
		all.set(own, group.rank * own.length);
		reduceHost(group, device, all);
		return all;
	};
}

function lastSnapshot(done: readonly TrainedStep[], step: number): number {
	return done.findLastIndex(({ snapshot }, at) => at <= step && snapshot !== null);
}

const fields = ["rank", "step", "layer", "pass", "token", "chosen", "leftOut", "gap"] as const;

/** Near ties of all ranks that can explain a difference in the last step: its own first, then earlier ones that grew. */
function candidatesOf(done: readonly TrainedStep[], gather: Gather): NearTie[] {
	const own = done.map(({ found }) => found.toSorted((a, b) => a.gap - b.gap).slice(0, mostTies));
	const packed = new Float64Array(done.length * mostTies * fields.length).fill(-1);
	for (const [index, tie] of own.flat().entries()) {
		packed.set(
			fields.map((field) => tie[field]),
			index * fields.length,
		);
	}
	const all = gather(packed);
	return Array.from({ length: all.length / fields.length }, (_, index) => {
		const values = all.subarray(index * fields.length, (index + 1) * fields.length);
		return Object.fromEntries(fields.map((field, at) => [field, values[at]!])) as unknown as NearTie;
	})
		.filter(({ rank }) => rank >= 0)
		.sort((a, b) => b.step - a.step || a.gap - b.gap)
		.filter((tie, at, all) => all.findIndex((other) => isSame(tie, other)) === at);
}

// The state of a training between two steps: weights, the optimizer's state, the routers' biases of this rank.

type Trained = Pick<TrainingState, "replicas" | "language" | "optimizer" | "scalars">;

/** In host memory. Every rank takes and restores its own. */
class Snapshot {
	readonly #contents: readonly { readonly tensor: Tensor; readonly bytes: Uint8Array }[];

	constructor(private readonly state: Trained) {
		const { device } = state.scalars;
		this.#contents = tensorsOf(state).map((tensor) => {
			const bytes = new Uint8Array(tensor.bytes);
			device.copyToHost(bytes, tensor);
			return { tensor, bytes };
		});
	}

	restore(): void {
		const { device } = this.state.scalars;
		for (const { tensor, bytes } of this.#contents) device.copyToDevice(tensor, bytes);
	}
}

function tensorsOf({ replicas, language, optimizer, scalars }: Trained): Tensor[] {
	return [
		...replicas
			.flatMap(({ parameters }) => parameters.buffers.filter(({ frozen }) => !frozen))
			.map(({ values }) => values),
		...optimizer.shards.flatMap(({ buffer, master, states }) => [
			...(buffer.dtype === "f32" ? [] : [master]),
			...states.values(),
		]),
		...[...(language?.model.routers.values() ?? [])].map(({ expertBias }) => expertBias),
		scalars.step,
	];
}

// Near ties in routing. Two scores closer than fp32 rounding are ordered differently on another processor, after which two
// correct runs diverge. A comparison with a reference finds near ties and, if a step is off, may decide them as the reference
// did: either the values agree again, or the difference has another cause.

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
function isSame(a: NearTie, b: NearTie): boolean {
	return (["rank", "step", "layer", "pass", "token", "chosen", "leftOut"] as const).every((key) => a[key] === b[key]);
}

/** Raises the left-out expert's logit just past the chosen one: by about the gap, less than rounding moves it. */
function raise(logits: Float32Array, { chosen, leftOut }: NearTie, key: (expert: number, logit: number) => number) {
	const start = logits[leftOut]!;
	const goal = key(chosen, logits[chosen]!);
	for (let by = 1e-8; key(leftOut, logits[leftOut]!) <= goal; by *= 1.5) logits[leftOut] = start + by;
}

/** A sentence for people. */
function describeTie({ rank, step, layer, pass, token, chosen, leftOut, gap }: NearTie): string {
	return `step ${step + 1}, layer ${layer}, token ${token} of pass ${pass} on rank ${rank}: expert ${leftOut} rather than ${chosen}, whose scores differ by ${gap.toExponential(1)}`;
}
