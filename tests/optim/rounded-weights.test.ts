/** Matrices in e4m3 are made once and follow their weights: after an update, and after weights were loaded. */
import { expect, test } from "bun:test";
import { Optimizer } from "../../src/optim/optimizer.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { singleReplica } from "../../src/parallel/data-parallel.ts";
import { ParameterSet } from "../../src/parallel/parameter-set.ts";
import { E4m3Matrices } from "../../src/tensor/ops/e4m3.ts";
import { bytesOf, randomValues, testDevice } from "../support.ts";

const places = { decays: true, expert: true, replicated: false, copy: "none", frozen: false } as const;

test("matrices in e4m3 follow the weights", async () => {
	using device = await testDevice(1);
	const request = { name: "experts", shape: [2, 160, 144], dtype: "bf16", ...places } as const;
	using parameters = new ParameterSet(device, [request]);
	const weights = parameters.get("experts");
	using scalars = new StepScalars(device);
	const replica = singleReplica(parameters);
	using optimizer = new Optimizer([replica], scalars, { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
	for (const [name, value] of [
		["foundInf", 0],
		["clipFactor", 1],
		["learningRate", 0.5],
	] as const) {
		scalars.set(name, value);
	}
	const load = (seed: number) => {
		device.copyToDevice(weights.value, bits(randomValues(weights.value.elements, seed)));
		optimizer.refreshMasters();
	};
	const now = () => {
		const kept = weights.inE4m3({ transposed: true });
		expect(weights.inE4m3({ transposed: true })).toBe(kept);
		using fresh = new E4m3Matrices(weights.value, { transposed: true });
		for (const part of ["values", "transposed", "factors"] as const) {
			expect(bytesOf(kept[part]!)).toEqual(bytesOf(fresh[part]!));
		}
		return bytesOf(kept.values);
	};
	load(1);
	const first = now();
	device.copyToDevice(weights.mainGradient!, randomValues(weights.value.elements, 2));
	optimizer.step();
	const second = now();
	expect(second).not.toEqual(first);
	load(1);
	expect(now()).toEqual(first);
});

/** bf16 by dropping the lower halves. */
function bits(values: Float32Array): Uint16Array {
	return Uint16Array.from(new Uint32Array(values.buffer, values.byteOffset, values.length), (word) => word >>> 16);
}
