/** Probes of tensors whose elements lie on several ranks: the sums of every rank over its own part, and the verdict. */
import type { Device } from "../native/device.ts";
import type { Group, Reduction } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";
import type { Check } from "./comparison.ts";

/** Largest difference of a probed value, in units of the tensor's rms. */
const probeLimit = 2e-5;

export interface Probe {
	/** Such as "step 1 layer 3". */
	readonly name: string;
	/** Elements of the whole tensor. */
	readonly elements: number;
	readonly mean: number;
	readonly rms: number;
	/** Absent where it was not recorded. */
	readonly absmax?: number;
	/** First values in memory order. */
	readonly head: readonly number[];
	/** Σ xᵢ cos i / √n over the n elements in memory order, which tells a wrong order; absent where it was not recorded. */
	readonly wave?: number;
}

// Sums of a probe: elements, Σ x, Σ x², Σ x cos i, then its head.
const fixed = 4;

export class ProbeSums {
	readonly #sums: Float64Array;
	readonly #largest: Float64Array;
	readonly #begin: readonly number[];

	constructor(readonly probes: readonly Probe[]) {
		let end = 0;
		this.#begin = probes.map(({ head }) => {
			const begin = end;
			end += fixed + head.length;
			return begin;
		});
		this.#sums = new Float64Array(end);
		this.#largest = new Float64Array(probes.length);
	}

	/** Adds values of probe `index` that stand one after the other in its tensor, from element `first` on. */
	add(index: number, values: Float32Array, first: number): void {
		const begin = this.#begin[index]!;
		const head = this.probes[index]!.head.length;
		const sums = this.#sums;
		const waves = this.probes[index]!.wave !== undefined;
		for (const [at, value] of values.entries()) {
			sums[begin + 1]! += value;
			sums[begin + 2]! += value * value;
			if (waves) sums[begin + 3]! += value * Math.cos(first + at);
			this.#largest[index] = Math.max(this.#largest[index]!, Math.abs(value));
			if (first + at < head) sums[begin + fixed + first + at]! += value;
		}
		sums[begin]! += values.length;
	}

	/** Sums of every rank of `group`, which calls this together: a check of each probe, its worst value. */
	checks(group: Group, device: Device): Check[] {
		reduceHost(group, device, this.#sums, "sum");
		reduceHost(group, device, this.#largest, "max");
		return this.probes.map((probe, index) => {
			const begin = this.#begin[index]!;
			const [elements, sum, squares, waves] = this.#sums.subarray(begin, begin + fixed) as unknown as number[] as [
				...[number, number, number, number],
			];
			const compared: [actual: number, expected: number][] = [
				[Math.sqrt(squares / elements), probe.rms],
				[sum / elements, probe.mean],
				...(probe.absmax === undefined ? [] : [[this.#largest[index]!, probe.absmax] as [number, number]]),
				...(probe.wave === undefined ? [] : [[waves / Math.sqrt(elements), probe.wave] as [number, number]]),
				...probe.head.map((wanted, at): [number, number] => [this.#sums[begin + fixed + at]!, wanted]),
			];
			return elements === probe.elements ? worstOf(probe, compared) : elementsCheck(probe, elements);
		});
	}
}

function worstOf({ name, rms }: Probe, compared: readonly [number, number][]): Check {
	const error = ([actual, expected]: readonly [number, number]) => Math.abs(actual - expected) / rms;
	// NaN is the worst there is.
	const worst = compared.reduce((a, b) => (Number.isNaN(error(a)) || error(b) <= error(a) ? a : b));
	return { name, expected: worst[1], actual: worst[0], error: error(worst), limit: probeLimit };
}

function elementsCheck({ name, elements }: Probe, found: number): Check {
	return { name: `${name} elements`, expected: elements, actual: found, error: Number.POSITIVE_INFINITY, limit: 0 };
}

/** values = their reduction over `group`. Every rank of it calls this together. */
export function reduceHost(group: Group, device: Device, values: Float64Array, reduction: Reduction = "sum"): void {
	if (values.length === 0) return;
	using all = Tensor.from(device, values);
	group.allReduce(all, reduction).wait();
	device.copyToHost(values, all);
}
