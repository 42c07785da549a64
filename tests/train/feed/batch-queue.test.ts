/** The order in which batches are read, and the step that a failed read belongs to. */
import { expect, test } from "bun:test";
import type { ImageTextMicrobatch } from "../../../src/data/microbatch.ts";
import { BatchQueue } from "../../../src/train/feed/shared-batches.ts";

/** Batches that are their step's number; the read of `broken` fails. */
function numbered(broken?: number) {
	const asked: number[] = [];
	const step = (iteration: number) => {
		asked.push(iteration);
		if (iteration === broken) throw new Error(`step ${iteration} is damaged`);
		return [iteration] as unknown as ImageTextMicrobatch[];
	};
	return { asked, source: { step } };
}

const numbers = ({ microbatches, upcoming }: Awaited<ReturnType<BatchQueue["step"]>>) =>
	[microbatches, upcoming] as unknown;

test("a step's batches are read once, during the step before", async () => {
	const { asked, source } = numbered();
	const queue = new BatchQueue(source, 3, 0);
	for (const iteration of [1, 2, 3]) {
		expect(numbers(await queue.step(iteration))).toEqual([[iteration], []]);
		expect(asked.at(-1)).toBe(iteration);
		await queue.readAhead(iteration);
	}
	expect(asked).toEqual([1, 2, 3]);
});

test("a step that wants the next step's batches has them, to the last step", async () => {
	const { asked, source } = numbered();
	const queue = new BatchQueue(source, 7, 1);
	expect(numbers(await queue.step(5))).toEqual([[5], [6]]);
	await queue.readAhead(5);
	expect(asked).toEqual([5, 6, 7]);
	expect(numbers(await queue.step(6))).toEqual([[6], [7]]);
	await queue.readAhead(6);
	expect(numbers(await queue.step(7))).toEqual([[7], []]);
	expect(asked).toEqual([5, 6, 7]);
});

test("a source that keeps a state is never ahead of its step", async () => {
	const { asked, source } = numbered();
	const queue = new BatchQueue({ ...source, save: async () => null }, 3, 1);
	expect(numbers(await queue.step(1))).toEqual([[1], []]);
	await queue.readAhead(1);
	expect(asked).toEqual([1]);
});

test("a read that fails ahead of time fails its own step", async () => {
	const queue = new BatchQueue(numbered(2).source, 3, 0);
	await queue.step(1);
	await queue.readAhead(1);
	await expect(queue.step(2)).rejects.toThrow("step 2 is damaged");
});

test("a failed read of batches that a step wants early fails that step, after the one before is done", async () => {
	const queue = new BatchQueue(numbered(3).source, 4, 1);
	expect(numbers(await queue.step(1))).toEqual([[1], [2]]);
	await queue.readAhead(1);
	await expect(queue.step(2)).rejects.toThrow("step 3 is damaged");
});
