/**
 * AdamW over a model's flat parameter buffers (docs/spec/runtime.md §4.3), with fp32 master weights where values are
 * bf16.
 */
import type { DataParallel, ParameterBuffer } from "../parallel/index.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor/index.ts";
import type { StepScalars } from "./step-scalars.ts";

export interface AdamWOptions {
	readonly beta1: number;
	readonly beta2: number;
	readonly epsilon: number;
	/** Storage dtypes of the moments; default f32. Arithmetic is always fp32 (docs/spec/runtime.md §4.2). */
	readonly moments?: Moments;
	/** Multiplier of the scheduled weight decay for a parameter, by name; default decayMultiplier. */
	readonly weightDecayMultiplier?: (name: string) => number;
	/** Multiplier of the scheduled learning rate for a parameter, by name; default 1. */
	readonly learningRateMultiplier?: (name: string) => number;
}

/** Storage types of Adam's moments. */
export interface Moments {
	readonly expAvg: FloatDtype;
	readonly expAvgSq: FloatDtype;
}

/**
 * Megatron's rule (docs/spec/language-model.md §7.2): matrices decay at the scheduled rate, vectors and biases not at
 * all.
 */
export function decayMultiplier(decays: boolean): number {
	return decays ? 1 : 0;
}

/** The range of a buffer that this rank's optimizer updates, and the optimizer state of the range. */
export interface OptimizerShard {
	readonly buffer: ParameterBuffer;
	readonly begin: number;
	readonly end: number;
	/** fp32 master weights; the model's own values if those are fp32. */
	readonly master: Tensor;
	readonly expAvg: Tensor;
	readonly expAvgSq: Tensor;
}

interface Run {
	readonly begin: number;
	readonly end: number;
	readonly decay: number;
	readonly rate: number;
}

export class AdamW implements Disposable {
	readonly shards: readonly OptimizerShard[];
	readonly #runs: ReadonlyMap<OptimizerShard, readonly Run[]>;

	/** Updates the range of each module's buffers that this rank owns. */
	constructor(
		replicas: readonly DataParallel[],
		readonly scalars: StepScalars,
		readonly options: AdamWOptions,
	) {
		this.shards = replicas.flatMap((replica) =>
			replica.parameters.buffers
				.filter(({ frozen }) => !frozen)
				.map((buffer) => shardOf(replica, buffer, options.moments)),
		);
		this.#runs = new Map(this.shards.map((shard) => [shard, this.#runsOf(shard)]));
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

	/** Makes one update from the gradients times the clip factor; does nothing if found-inf is set. */
	step(): void {
		const { scalars, options } = this;
		const { device } = scalars;
		device.run("adam_advance", {
			step: scalars.step,
			bias_correction1: scalars.get("biasCorrection1"),
			bias_correction2: scalars.get("biasCorrection2"),
			found_inf: scalars.get("foundInf"),
			beta1: options.beta1,
			beta2: options.beta2,
		});
		for (const shard of this.shards) {
			shard.buffer.valuesChanged();
			for (const { begin, end, decay, rate } of this.#runs.get(shard)!) {
				const count = end - begin;
				using master = shard.master.columns(begin - shard.begin, count);
				using expAvg = shard.expAvg.columns(begin - shard.begin, count);
				using expAvgSq = shard.expAvgSq.columns(begin - shard.begin, count);
				using gradient = shard.buffer.gradients!.columns(begin, count);
				using values = shard.buffer.values.columns(begin, count);
				const separate = shard.buffer.dtype !== "f32";
				device.run("adamw", {
					master,
					model: separate ? values : null,
					gradient,
					exp_avg: expAvg,
					exp_avg_sq: expAvgSq,
					learning_rate: scalars.get("learningRate"),
					weight_decay: scalars.get("weightDecay"),
					clip_factor: scalars.get("clipFactor"),
					bias_correction1: scalars.get("biasCorrection1"),
					bias_correction2: scalars.get("biasCorrection2"),
					found_inf: scalars.get("foundInf"),
					elements: count,
					beta1: options.beta1,
					beta2: options.beta2,
					epsilon: options.epsilon,
					weight_decay_multiplier: decay,
					learning_rate_multiplier: rate,
					model_dtype: values.dtypeCode,
					exp_avg_dtype: expAvg.dtypeCode,
					exp_avg_sq_dtype: expAvgSq.dtypeCode,
				});
			}
		}
	}

	/** Runs of neighbouring elements with equal multipliers; padding belongs to the run before it. */
	#runsOf(shard: OptimizerShard): Run[] {
		const { weightDecayMultiplier, learningRateMultiplier } = this.options;
		const runs: { begin: number; end: number; decay: number; rate: number }[] = [];
		shard.buffer.entries.forEach((entry, index) => {
			const next = shard.buffer.entries[index + 1]?.offset ?? shard.buffer.elements;
			const begin = Math.max(entry.offset, shard.begin);
			const end = Math.min(next, shard.end);
			if (begin >= end) return;
			const decay = weightDecayMultiplier?.(entry.name) ?? decayMultiplier(entry.decays);
			const rate = learningRateMultiplier?.(entry.name) ?? 1;
			const last = runs.at(-1);
			if (last && last.decay === decay && last.rate === rate && last.end === begin) last.end = end;
			else runs.push({ begin, end, decay, rate });
		});
		return runs;
	}

	[Symbol.dispose](): void {
		for (const { master, expAvg, expAvgSq } of this.shards) {
			master[Symbol.dispose]();
			expAvg[Symbol.dispose]();
			expAvgSq[Symbol.dispose]();
		}
	}
}

function shardOf(
	replica: DataParallel,
	buffer: ParameterBuffer,
	{ expAvg, expAvgSq }: Moments = { expAvg: "f32", expAvgSq: "f32" },
): OptimizerShard {
	const { device } = replica.parameters;
	const { begin, end } = replica.owned(buffer);
	const count = end - begin;
	return {
		buffer,
		begin,
		end,
		master:
			buffer.dtype === "f32" ? buffer.values.columns(begin, count) : Tensor.empty(device, [count], "f32", "optimizer"),
		expAvg: Tensor.zeros(device, [count], expAvg, "optimizer"),
		expAvgSq: Tensor.zeros(device, [count], expAvgSq, "optimizer"),
	};
}
