/**
 * The optimizer of a run: for each flat parameter buffer the range that this rank updates (ZeRO-1), its fp32 masters, and the state
 * of the rule that updates it: AdamW, or Muon where the buffer holds whole matrices (docs/spec/runtime.md §4.3, §4.5).
 */
import type { DataParallel, ParameterBuffer } from "../parallel/index.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor/index.ts";
import { AdamW, type AdamWOptions } from "./adamw.ts";
import { Muon, type MuonOptions } from "./muon.ts";
import type { StepScalars } from "./step-scalars.ts";

/** Names of state tensors, in checkpoints too. */
export type StateName = "exp_avg" | "exp_avg_sq" | "momentum_buffer";

/** A rule of updates and what it keeps of each element. */
export interface UpdateRule {
	readonly states: Readonly<Partial<Record<StateName, FloatDtype>>>;
	/** Updates masters and values from the gradients times the clip factor; does nothing if found-inf is set. */
	update(shards: readonly OptimizerShard[]): void;
}

/** The range of a buffer that this rank's optimizer updates, and the optimizer state of the range. */
export interface OptimizerShard {
	readonly replica: DataParallel;
	readonly buffer: ParameterBuffer;
	readonly begin: number;
	readonly end: number;
	/** fp32 master weights; the model's own values if those are fp32. */
	readonly master: Tensor;
	readonly states: ReadonlyMap<StateName, Tensor>;
	/** Runs of neighbouring elements with equal multipliers; padding belongs to the run before it. */
	readonly runs: readonly ElementRun[];
}

/** Elements of a buffer with one multiplier of the weight decay and one of the learning rate. */
interface ElementRun {
	readonly begin: number;
	readonly end: number;
	readonly decay: number;
	readonly rate: number;
}

export interface OptimizerOptions extends AdamWOptions {
	/** Multiplier of the scheduled weight decay for a parameter, by name; default decayMultiplier. */
	readonly weightDecayMultiplier?: (name: string) => number;
	/** Multiplier of the scheduled learning rate for a parameter, by name; default 1. */
	readonly learningRateMultiplier?: (name: string) => number;
	/** Of the matrices that buffers hold as such; absent: there are none. */
	readonly muon?: MuonOptions | null;
}

/**
 * Megatron's rule (docs/spec/language-model.md §7.2): matrices decay at the scheduled rate, vectors and biases not at
 * all.
 */
export function decayMultiplier(decays: boolean): number {
	return decays ? 1 : 0;
}

export class Optimizer implements Disposable {
	readonly shards: readonly OptimizerShard[];
	readonly #rules: readonly (readonly [UpdateRule, readonly OptimizerShard[]])[];

	/** Updates the range of each module's buffers that this rank owns. */
	constructor(
		replicas: readonly DataParallel[],
		readonly scalars: StepScalars,
		readonly options: OptimizerOptions,
	) {
		const elements = new AdamW(scalars, options);
		const matrices = options.muon ? new Muon(scalars, options.muon) : null;
		const byRule = new Map<UpdateRule, OptimizerShard[]>();
		this.shards = replicas.flatMap((replica) =>
			replica.parameters.buffers
				.filter(({ frozen }) => !frozen)
				.map((buffer) => {
					const rule = (buffer.matrices && matrices) || elements;
					const shard = shardOf(replica, buffer, rule, options);
					byRule.set(rule, [...(byRule.get(rule) ?? []), shard]);
					return shard;
				}),
		);
		this.#rules = [...byRule];
		this.refreshMasters();
	}

	/**
	 * Copies the model's values into the fp32 masters: after initialisation, or after loading weights without optimizer state.
	 */
	refreshMasters(): void {
		for (const { buffer, begin, end, master } of this.shards) {
			buffer.valuesChanged();
			if (buffer.dtype === "f32") continue;
			using values = buffer.values.columns(begin, end - begin);
			copyInto(values, master);
		}
	}

	/** Makes one update from the gradients times the clip factor, which it may overwrite; does nothing if found-inf is set. */
	step(): void {
		const { scalars, options } = this;
		scalars.device.run("adam_advance", {
			step: scalars.step,
			bias_correction1: scalars.get("biasCorrection1"),
			bias_correction2: scalars.get("biasCorrection2"),
			found_inf: scalars.get("foundInf"),
			beta1: options.beta1,
			beta2: options.beta2,
		});
		for (const { buffer } of this.shards) buffer.valuesChanged();
		for (const [rule, shards] of this.#rules) rule.update(shards);
	}

	[Symbol.dispose](): void {
		for (const { master, states } of this.shards) {
			master[Symbol.dispose]();
			for (const state of states.values()) state[Symbol.dispose]();
		}
	}
}

function shardOf(
	replica: DataParallel,
	buffer: ParameterBuffer,
	{ states }: UpdateRule,
	options: OptimizerOptions,
): OptimizerShard {
	const { device } = replica.parameters;
	const { begin, end } = replica.owned(buffer);
	const count = end - begin;
	return {
		...{ replica, buffer, begin, end },
		master:
			buffer.dtype === "f32" ? buffer.values.columns(begin, count) : Tensor.empty(device, [count], "f32", "optimizer"),
		states: new Map(
			Object.entries(states).map(([name, dtype]) => [
				name as StateName,
				Tensor.zeros(device, [count], dtype, "optimizer"),
			]),
		),
		runs: runsOf(buffer, begin, end, options),
	};
}

function runsOf(
	buffer: ParameterBuffer,
	first: number,
	last: number,
	{ weightDecayMultiplier, learningRateMultiplier }: OptimizerOptions,
): ElementRun[] {
	const runs: { begin: number; end: number; decay: number; rate: number }[] = [];
	buffer.entries.forEach((entry, index) => {
		const next = buffer.entries[index + 1]?.offset ?? buffer.elements;
		const begin = Math.max(entry.offset, first);
		const end = Math.min(next, last);
		if (begin >= end) return;
		const decay = weightDecayMultiplier?.(entry.name) ?? decayMultiplier(entry.decays);
		const rate = learningRateMultiplier?.(entry.name) ?? 1;
		const before = runs.at(-1);
		if (before && before.decay === decay && before.rate === rate && before.end === begin) before.end = end;
		else runs.push({ begin, end, decay, rate });
	});
	return runs;
}
