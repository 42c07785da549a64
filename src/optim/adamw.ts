/** AdamW's update of ranges of flat parameter buffers (docs/spec/runtime.md §4.3). */
import type { FloatDtype } from "../tensor/index.ts";
import type { OptimizerShard, UpdateRule } from "./optimizer.ts";
import type { StepScalars } from "./step-scalars.ts";

export interface AdamWOptions {
	readonly beta1: number;
	readonly beta2: number;
	readonly epsilon: number;
	/** Storage dtypes of the moments; default f32. Arithmetic is always fp32 (docs/spec/runtime.md §4.2). */
	readonly moments?: Moments;
}

/** Storage types of Adam's moments. */
export interface Moments {
	readonly expAvg: FloatDtype;
	readonly expAvgSq: FloatDtype;
}

export class AdamW implements UpdateRule {
	readonly states: UpdateRule["states"];

	constructor(
		readonly scalars: StepScalars,
		readonly options: AdamWOptions,
	) {
		const { expAvg, expAvgSq } = options.moments ?? { expAvg: "f32", expAvgSq: "f32" };
		this.states = { exp_avg: expAvg, exp_avg_sq: expAvgSq };
	}

	update(shards: readonly OptimizerShard[]): void {
		const { scalars, options } = this;
		for (const { buffer, begin: first, master: masters, states, runs } of shards) {
			for (const { begin, end, decay, rate } of runs) {
				const count = end - begin;
				using master = masters.columns(begin - first, count);
				using expAvg = states.get("exp_avg")!.columns(begin - first, count);
				using expAvgSq = states.get("exp_avg_sq")!.columns(begin - first, count);
				using gradient = buffer.gradients!.columns(begin, count);
				using values = buffer.values.columns(begin, count);
				scalars.device.run("adamw", {
					master,
					model: buffer.dtype === "f32" ? null : values,
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
}
