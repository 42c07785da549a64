/**
 * The times at which gradients are summed: buckets, their order, and which of them start during backward or wait for
 * its end.
 */
import { afterAll, describe, expect, test } from "bun:test";
import { countingLibrary } from "../../src/native/counting-library.ts";
import { Device } from "../../src/native/device.ts";
import { DataParallel } from "../../src/parallel/data-parallel.ts";
import { type Group, groupOfOne } from "../../src/parallel/group.ts";
import { type BucketSize, type ParameterRequest, ParameterSet } from "../../src/parallel/parameter-set.ts";
import type { Tensor } from "../../src/tensor/tensor.ts";
import { testDevice } from "../support.ts";

const device = await testDevice(1);
afterAll(() => device[Symbol.dispose]());

const request = (name: string, elements: number, change: Partial<ParameterRequest> = {}): ParameterRequest => ({
	name,
	shape: [elements],
	dtype: "f32",
	decays: true,
	expert: false,
	replicated: false,
	copy: "none",
	frozen: false,
	...change,
});
const requests = [
	request("embedding", 100),
	request("norm", 10, { replicated: true }),
	request("layer.0", 50),
	request("experts.0", 70, { expert: true }),
	request("frozen", 1000, { frozen: true }),
	request("layer.1", 60),
	request("output", 30),
];
const namesOf = (set: ParameterSet) => set.buffers.map(({ entries }) => entries.map(({ name }) => name).join(" "));

/** Parameters in buffers of `buckets`, whose sums are noted as they start and as they are waited for. */
function open(
	buckets: BucketSize | undefined,
	options: { readonly zero?: boolean; readonly tokensCut?: boolean } = {},
) {
	const parameters = new ParameterSet(device, requests, { dense: 2, expert: 2 }, buckets);
	const log: string[] = [];
	const bufferOf = (x: Tensor) => {
		const found = parameters.buffers.find(({ gradients }) => gradients?.allocation === x.allocation);
		return found?.entries.map(({ name }) => name).join(" ") ?? "nothing";
	};
	const group = (name: string): Group => {
		const start = (what: string) => (x: Tensor) => {
			log.push(`${name} ${what} ${bufferOf(x)}`);
			return { wait: () => void log.push(`waited for ${what} ${bufferOf(x)}`) };
		};
		const alone = groupOfOne(name, 0);
		return { ...alone, size: 2, allReduce: start("sum"), reduceScatter: start("scatter"), allGather: start("gather") };
	};
	const groups = {
		dense: group("dense"),
		expert: group("expert"),
		sequenceParallel: options.tokensCut ? group("tp") : null,
		copies: null,
	};
	const replica = new DataParallel(parameters, groups, {
		distributedOptimizer: options.zero ?? false,
		overlaps: buckets !== undefined,
	});
	const ready = (...names: string[]) => {
		for (const name of names) replica.gradientReady(parameters.get(name));
	};
	return { parameters, replica, log, ready, [Symbol.dispose]: () => parameters[Symbol.dispose]() };
}

test("a bucket closes at its size; kinds do not share one", () => {
	using whole = open(undefined);
	expect(namesOf(whole.parameters)).toEqual(["embedding layer.0 layer.1 output", "norm", "experts.0", "frozen"]);
	using small = open({ elements: 110 });
	expect(namesOf(small.parameters)).toEqual(["embedding layer.0", "layer.1 output", "norm", "experts.0", "frozen"]);
	using single = open({ elements: 0 });
	expect(namesOf(single.parameters)).toHaveLength(requests.length);
	// 1320 elements, the frozen ones among them, over 8.
	using counted = open({ count: 8 });
	using same = open({ elements: 165 });
	expect(namesOf(counted.parameters)).toEqual(namesOf(same.parameters));
});

test("sums start from the last bucket on, as soon as it and all before it are full", () => {
	using it = open({ elements: 110 });
	it.ready("output");
	expect(it.log).toEqual([]);
	it.ready("layer.1");
	const first = ["dense scatter layer.1 output", "dense gather layer.1 output"];
	expect(it.log).toEqual(first);
	// The first bucket is full before the experts: it waits for its turn.
	it.ready("layer.0", "embedding");
	expect(it.log).toEqual(first);
	it.ready("experts.0");
	expect(it.log.slice(2)).toEqual(["expert scatter experts.0", "expert gather experts.0"]);
	it.replica.reduce();
	const names = ["layer.1 output", "experts.0", "norm", "embedding layer.0"];
	expect(it.log.slice(4)).toEqual([
		...names.slice(2).flatMap((name) => [`dense scatter ${name}`, `dense gather ${name}`]),
		...names.flatMap((name) => [`waited for scatter ${name}`, `waited for gather ${name}`]),
	]);
	// The next step begins anew.
	it.log.splice(0);
	it.ready("output");
	expect(it.log).toEqual([]);
});

test("a rank whose backward gives nothing starts the same sums in the same order, at the end", () => {
	const order = (run: (it: ReturnType<typeof open>) => void) => {
		using it = open({ elements: 0 }, { zero: true });
		run(it);
		it.replica.reduce();
		return it.log.filter((line) => !line.startsWith("waited"));
	};
	const silent = order(() => {});
	expect(silent).toEqual([
		"dense scatter output",
		"dense scatter layer.1",
		"expert scatter experts.0",
		"dense scatter layer.0",
		"dense scatter norm",
		"dense scatter embedding",
	]);
	expect(order((it) => it.ready("output", "layer.1", "experts.0", "layer.0", "norm", "embedding"))).toEqual(silent);
	expect(order((it) => it.ready("embedding", "norm", "output"))).toEqual(silent);
});

test("what is summed over the ranks that cut tokens waits for the end of backward", () => {
	using it = open({ elements: 0 }, { tokensCut: true });
	it.ready("output", "layer.1", "experts.0", "layer.0", "norm", "embedding");
	expect(it.log.at(-1)).toBe("dense gather embedding");
	expect(it.log.join(" ")).not.toContain("norm");
	it.replica.reduce();
	expect(it.log.filter((line) => line.includes("norm"))).toEqual([
		"tp sum norm",
		"waited for sum norm",
		"dense scatter norm",
		"dense gather norm",
		"waited for scatter norm",
		"waited for gather norm",
	]);
});

test("replicas whose sums start during backward meet beforehand, on all ranks in one order", () => {
	using it = open({ elements: 0 }, { tokensCut: true });
	it.replica.connect();
	expect(it.log).toEqual([
		"dense sum nothing",
		"waited for sum nothing",
		"expert sum nothing",
		"waited for sum nothing",
	]);
	using late = open(undefined);
	late.replica.connect();
	expect(late.log).toEqual([]);
});

test("without overlap nothing starts before reduce", () => {
	using it = open(undefined);
	it.ready("output", "layer.1", "layer.0", "embedding");
	expect(it.log).toEqual([]);
	it.replica.reduce();
	expect(it.log.filter((line) => line.includes(" scatter ") && !line.startsWith("waited"))).toHaveLength(3);
});

/** Writes NaN over all memory of the gradients, the padding too. */
function poison(parameters: ParameterSet): void {
	for (const { gradients } of parameters.buffers) {
		if (gradients) device.run("fill", { y: gradients, elements: gradients.elements, value: Number.NaN, dtype: 0 });
	}
}

describe("gradients are zero after zeroGradients, whatever their memory held", () => {
	const matrices = [
		request("table", 0, { shape: [5, 7] }),
		request("vector", 9, { decays: false }),
		request("experts", 0, { shape: [2, 3, 33], expert: true }),
		request("weight", 0, { shape: [64, 3] }),
		request("decaying vector", 11),
	];
	const open = () => {
		const parameters = new ParameterSet(device, matrices, { dense: 2, expert: 2 });
		poison(parameters);
		parameters.zeroGradients();
		return parameters;
	};

	test("for who looks at a parameter's", () => {
		using parameters = open();
		for (const { name, mainGradient } of parameters) {
			expect(
				mainGradient!.toFloat32().every((g) => g === 0),
				name,
			).toBeTrue();
		}
	});

	test("for who takes a whole buffer, to which only some parameters were added", () => {
		using parameters = open();
		parameters.get("weight").addToGradient((into, accumulate) => {
			expect(accumulate).toBeFalse();
			device.run("fill", { y: into, elements: into.elements, value: 2, dtype: 0 });
		});
		const sum = (values: Float32Array) => values.reduce((a, b) => a + b, 0);
		expect(parameters.buffers.map(({ gradients }) => sum(gradients!.toFloat32()))).toEqual([2 * 192, 0]);
	});

	test("for a bucket's sum that starts during backward", () => {
		using parameters = open();
		const seen: number[] = [];
		const alone = groupOfOne("dp", 0);
		const look = (x: Tensor) => {
			seen.push(...x.toFloat32());
			return { wait() {} };
		};
		const group: Group = { ...alone, size: 2, reduceScatter: look, allGather: () => ({ wait() {} }) };
		const replica = new DataParallel(
			parameters,
			{ dense: group, expert: group, sequenceParallel: null, copies: null },
			{ overlaps: true },
		);
		for (const parameter of parameters) replica.gradientReady(parameter);
		expect(seen.length).toBe(parameters.buffers.reduce((total, { elements }) => total + elements, 0));
		expect(seen.every((g) => g === 0)).toBeTrue();
	});

	test("and matrices' memory is not touched for it", () => {
		const cleared: number[] = [];
		using counted = Device.open(
			countingLibrary({
				kind: "cpu",
				observe: (name, { elements }) => name === "fill" && cleared.push(elements!),
			}),
		);
		using parameters = new ParameterSet(counted, matrices, { dense: 2, expert: 2 });
		cleared.splice(0);
		parameters.zeroGradients();
		// Between table and weight 29 elements of padding; behind weight, where its 192 end, both vectors; behind experts 58.
		const all = parameters.buffers.reduce((total, { elements }) => total + elements, 0);
		expect(cleared.reduce((a, b) => a + b, 0)).toBe(all - 5 * 7 - 2 * 3 * 33 - 64 * 3);
		expect(cleared).toHaveLength(3);
	});
});

test("a buffer that its ranks cannot share equally is refused", () => {
	using parameters = new ParameterSet(device, requests, { dense: 2, expert: 2 });
	const three: Group = { ...groupOfOne("dp", 0), size: 3 };
	expect(
		() => new DataParallel(parameters, { dense: three, expert: three, sequenceParallel: null, copies: null }),
	).toThrow("which 3 ranks cannot share equally");
	const { values } = parameters.buffers[0]!;
	expect(() => values.columns(0.5, 1)).toThrow(RangeError);
	expect(() => values.columns(0, 0.5)).toThrow(RangeError);
});
