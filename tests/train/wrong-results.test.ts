/** Wrong results of a rank: the replica that others outvote, state that changes between updates, values that are far too large. */
import { afterAll, expect, test } from "bun:test";
import type { TrainingConfiguration } from "../../src/config/schema.ts";
import { Optimizer } from "../../src/optim/optimizer.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { DataParallel } from "../../src/parallel/data-parallel.ts";
import { type Group, groupOfOne } from "../../src/parallel/group.ts";
import { ParameterSet } from "../../src/parallel/parameter-set.ts";
import type { WrongResult } from "../../src/system/errors.ts";
import type { Run } from "../../src/train/assemble.ts";
import { atTheStart } from "../../src/train/listeners.ts";
import { LargeValues, outvoted, StateCheck } from "../../src/train/wrong-results.ts";
import { testDevice } from "../support.ts";

const device = await testDevice(1);
afterAll(() => device[Symbol.dispose]());

test("a replica is outvoted by more than half of all", () => {
	const votes = (...of: readonly number[]) => outvoted(of.map((one) => Int32Array.of(one, 1)));
	expect(votes(5, 5, 5)).toEqual([]);
	expect(votes(5, 6, 5)).toEqual([1]);
	expect(votes(6, 5, 5, 7, 5)).toEqual([0, 3]);
	expect(votes(5, 6)).toBeNull();
	expect(votes(5, 6, 5, 6)).toBeNull();
	expect(outvoted([Int32Array.of(1, 2), Int32Array.of(1, 3), Int32Array.of(1, 2)])).toEqual([1]);
});

/** One of `ranks`, the first, whose replicas say what `others` makes of its words. */
function open(others: readonly ((words: Int32Array) => Int32Array)[], distributedOptimizer = false) {
	const shape = {
		shape: [64, 2],
		dtype: "bf16",
		decays: true,
		expert: false,
		replicated: false,
		copy: "none",
	} as const;
	const requests = [
		{ ...shape, name: "a", frozen: false },
		{ ...shape, name: "b", frozen: true },
	];
	const size = others.length + 1;
	const parameters = new ParameterSet(device, requests, { dense: size, expert: 1 });
	const exchanges: number[] = [];
	const dense: Group = {
		...groupOfOne("dp", 4),
		size,
		ranks: Array.from({ length: size }, (_, member) => 4 + 2 * member),
		exchange: (words) => {
			exchanges.push(words.length);
			return [words, ...others.map((other) => other(words.slice()))];
		},
	};
	const groups = { dense, expert: groupOfOne("expt_dp", 4), sequenceParallel: null, copies: null };
	const replica = new DataParallel(parameters, groups, { distributedOptimizer });
	const scalars = new StepScalars(device);
	const optimizer = new Optimizer([replica], scalars, { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
	const intervals = { saveInterval: 5, nonPersistentSaveInterval: null, exitInterval: null };
	const c = { checkWeightHashAcrossDpReplicasInterval: 3, ...intervals } as TrainingConfiguration;
	const check = StateCheck.open(c, { rank: 4, state: { replicas: [replica], optimizer } } as unknown as Run)!;
	const [shard] = optimizer.shards;
	return {
		...{ check, exchanges, parameters, shard: shard! },
		after: (iteration: number) => check.betweenSteps({ ...atTheStart, iteration }),
		[Symbol.dispose]() {
			for (const owned of [optimizer, scalars, parameters]) owned[Symbol.dispose]();
		},
	};
}

function wrongResult(act: () => void): Pick<WrongResult, "rank" | "message" | "exitCode"> {
	try {
		act();
	} catch (error) {
		const { rank, message, exitCode } = error as WrongResult;
		return { rank, message, exitCode };
	}
	throw new Error("No result is wrong.");
}

const same = (words: Int32Array) => words;
const other = (words: Int32Array) => words.map((word, index) => word ^ index);

test("replicas are compared at multiples of the interval and where the state is saved", () => {
	using run = open([same, same]);
	for (let step = 1; step <= 6; step++) run.after(step);
	expect(run.exchanges).toEqual([2, 2, 2]);
	run.check.afterTraining({ ...atTheStart, iteration: 6 });
	run.check.beforeUpdate();
	run.check.afterTraining({ ...atTheStart, iteration: 7 });
	expect(run.exchanges).toHaveLength(4);
});

test("a replica of three that differs is named; of two neither", () => {
	using three = open([same, other]);
	expect(wrongResult(() => three.after(3))).toEqual({
		rank: 8,
		message:
			"After step 3 the parameters of rank 8 differ from those of ranks 4 and 6, data-parallel replicas that agree.",
		exitCode: 17,
	});
	using two = open([other]);
	expect(wrongResult(() => two.after(3))).toMatchObject({
		rank: null,
		message:
			"After step 3 the parameters of ranks 4 and 6, data-parallel replicas, differ, and no more than half of them agree.",
	});
});

test.each([
	["a value", "values", false],
	["a frozen value", "frozen", false],
	["a master", "master", true],
	["a moment", "exp_avg_sq", false],
	["a moment of ZeRO-1", "exp_avg_sq", true],
] as const)("%s that changes between two updates is this rank's fault", (_, where, zero) => {
	using run = open([same, same], zero);
	const { shard, parameters } = run;
	const frozen = parameters.buffers.find((buffer) => buffer.frozen)!;
	const tensor = {
		values: shard.buffer.values,
		frozen: frozen.values,
		master: shard.master,
		exp_avg_sq: shard.states.get("exp_avg_sq")!,
	}[where];
	run.after(3);
	run.check.beforeUpdate();
	run.after(6);
	using word = tensor.columns(6, 2);
	device.copyToDevice(word, new Uint8Array(word.bytes).fill(1, 0, 1));
	expect(wrongResult(() => run.check.beforeUpdate())).toEqual({
		rank: 4,
		message: "Parameters or optimizer state of rank 4 have changed since the update of step 6: its memory is at fault.",
		exitCode: 17,
	});
	// Of the state after a step that was not compared nothing is known.
	run.after(7);
	run.check.beforeUpdate();
});

test("a restored state is that which was copied, or not", () => {
	using run = open([same, same]);
	run.after(3);
	const known = run.check.known!;
	expect(run.check.resume(JSON.parse(JSON.stringify(known)))).toBe(true);
	device.setZero(run.shard.master, 4);
	device.copyToDevice(run.shard.master, Float32Array.of(1));
	expect(run.check.resume(known)).toBe(false);
});

test("a value of ten times the largest of the first hundred is too large", () => {
	const losses = new LargeValues("loss");
	for (let step = 1; step <= 100; step++) losses.require(step, step === 7 ? 1000 : 2);
	losses.require(101, 9999);
	expect(() => losses.require(102, 1e30)).toThrow("Step 102: the loss is 1e+30, 10 times as large as any of the 100");
	expect(() => new LargeValues("gradient norm").require(1, 1e30)).not.toThrow();
});
