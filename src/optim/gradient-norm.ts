/**
 * Global gradient norm and clip factor (docs/spec/runtime.md §4.4), computed on the device. Each rank sums the squares of the
 * elements that it owns and counts; one all-reduce over the world makes that the norm over all modules and ranks.
 */
import type { DataParallel, Group, ParameterBuffer } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";
import type { StepScalars } from "./step-scalars.ts";

/** gradient *= `factor`, for the elements that this rank owns. */
export function scaleGradients(replicas: readonly DataParallel[], scalars: StepScalars, factor: number): void {
	scalars.set("factor", factor);
	forOwned(replicas, (gradient) => {
		scalars.device.run("scale", { x: gradient, factor: scalars.get("factor"), elements: gradient.elements });
	});
}

/**
 * Writes scalars.gradientNorm (the norm of all gradients times `scale`) and foundInf from every rank's scalars.sumOfSquares of
 * the unscaled gradients. Writes scalars.clipFactor, the clip factor times `scale`, so that the update multiplies each gradient
 * once. maxNorm 0: no clipping.
 */
export function clipGradients(scalars: StepScalars, scale: number, maxNorm: number, world: Group): void {
	const { device, sumOfSquares } = scalars;
	scalars.set("foundInf", 0);
	scalars.set("factor", scale);
	world.allReduce(sumOfSquares).wait();
	device.copyToDevice(sumOfSquares, Float64Array.of(sumOfSquares.item() * scale ** 2));
	device.run("clip_factor", {
		sum_of_squares: sumOfSquares,
		norm: scalars.get("gradientNorm"),
		clip_factor: scalars.get("clipFactor"),
		found_inf: scalars.get("foundInf"),
		max_norm: maxNorm,
	});
	device.run("scale", { x: scalars.get("clipFactor"), factor: scalars.get("factor"), elements: 1 });
}

/** Σ g² of the elements this rank owns and counts; waits for the device. */
export function gradientSquares(replicas: readonly DataParallel[], scalars: StepScalars): number {
	sumSquares(replicas, scalars);
	return scalars.sumOfSquares.item();
}

/** Writes Σ g² of the elements that this rank owns and counts to scalars.sumOfSquares, without waiting for the device. */
export function sumSquares(replicas: readonly DataParallel[], { device, sumOfSquares }: StepScalars): void {
	device.setZero(sumOfSquares, sumOfSquares.bytes);
	forOwned(replicas, (gradient, counted) => {
		if (!counted) return;
		device.run("sum_of_squares", {
			x: gradient,
			sum: sumOfSquares,
			elements: gradient.elements,
			dtype: gradient.dtypeCode,
		});
	});
}

/** Visits this rank's range of every trainable buffer. */
function forOwned(replicas: readonly DataParallel[], visit: (gradient: Tensor, counted: boolean) => void): void {
	for (const replica of replicas) {
		for (const buffer of replica.parameters.buffers) {
			if (!buffer.gradients) continue;
			const { begin, end, counted } = replica.owned(buffer);
			using gradient = buffer.gradients.columns(begin, end - begin);
			visit(gradient, counted);
		}
	}
}

/** Visits the owned and counted elements of each parameter, without the padding between parameters. */
function forCounted(
	replicas: readonly DataParallel[],
	flat: (buffer: ParameterBuffer) => Tensor | null,
	visit: (part: Tensor) => void,
): void {
	for (const replica of replicas) {
		for (const buffer of replica.parameters.buffers) {
			const whole = flat(buffer);
			const owned = replica.owned(buffer);
			if (!whole || !owned.counted) continue;
			for (const { offset, elements } of buffer.entries) {
				const begin = Math.max(offset, owned.begin);
				const end = Math.min(offset + elements, owned.end);
				if (begin >= end) continue;
				using part = whole.columns(begin, end - begin);
				visit(part);
			}
		}
	}
}

/** Number of zero gradients over all ranks. */
export function countZeros(replicas: readonly DataParallel[], world: Group): number {
	const { device } = replicas[0]!.parameters;
	using count = Tensor.zeros(device, [1], "f64", "workspace");
	forCounted(
		replicas,
		({ gradients }) => gradients,
		(x) => device.run("count_zeros", { x, count, elements: x.elements }),
	);
	world.allReduce(count).wait();
	return count.item();
}

/** √Σ p² over all parameters of all ranks. */
export function parametersNorm(replicas: readonly DataParallel[], world: Group): number {
	const { device } = replicas[0]!.parameters;
	using sum = Tensor.zeros(device, [1], "f64", "workspace");
	forCounted(
		replicas,
		({ values }) => values,
		(x) => device.run("sum_of_squares", { x, sum, elements: x.elements, dtype: x.dtypeCode }),
	);
	world.allReduce(sum).wait();
	return Math.sqrt(sum.item());
}
