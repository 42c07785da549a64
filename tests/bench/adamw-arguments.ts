/** Arguments of the operation adamw for benchmarks: every multiplier is 1, and rates are such that values stay finite. */
import type { Tensor } from "../../src/tensor/tensor.ts";

export interface AdamwTensors {
	readonly master: Tensor;
	/** null: the masters are the model. */
	readonly model: Tensor | null;
	readonly gradient: Tensor;
	readonly expAvg: Tensor;
	readonly expAvgSq: Tensor;
	/** null: gradients are not looked at. */
	readonly foundInf: Tensor | null;
}

/** `scalar`: a number on the device. */
export function adamwArguments(tensors: AdamwTensors, scalar: (value: number) => Tensor) {
	const { master, model, gradient, expAvg, expAvgSq, foundInf } = tensors;
	return {
		master,
		model,
		gradient,
		exp_avg: expAvg,
		exp_avg_sq: expAvgSq,
		learning_rate: scalar(1e-4),
		weight_decay: scalar(0.1),
		clip_factor: scalar(0.5),
		bias_correction1: scalar(0.5),
		bias_correction2: scalar(0.5),
		found_inf: foundInf,
		elements: master.elements,
		beta1: 0.9,
		beta2: 0.95,
		epsilon: 1e-8,
		weight_decay_multiplier: 1,
		learning_rate_multiplier: 1,
		model_dtype: (model ?? master).dtypeCode,
		exp_avg_dtype: expAvg.dtypeCode,
		exp_avg_sq_dtype: expAvgSq.dtypeCode,
	};
}
