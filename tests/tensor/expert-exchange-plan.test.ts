/** The device's plan of an exchange of experts' rows against the host's, which places every single row. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { expectedExchange } from "../../src/native/counted-operations.ts";
import type { Device } from "../../src/native/device.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { planOnHost } from "../parallel/host-exchange.ts";
import { randomValues, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const cases = process.env.MIMO_TEST_FULL === "1" ? 20_000 : 3_000;

interface Case {
	readonly members: number;
	readonly expertTensor: number;
	readonly localExperts: number;
	/** [members][experts]. */
	readonly counts: readonly Int32Array[];
	readonly regionRows: number;
}

function randomIntegers(count: number, seed: number): number[] {
	return [...randomValues(count, seed)].map((value) => Math.floor((value + 1) * 2 ** 20));
}

function randomCase(seed: number): Case {
	const [ep = 0, expertTensor = 0, localExperts = 0, most = 0, kind = 0, quiet = 0] = randomIntegers(6, seed);
	const shape = { expertTensor: 1 + (expertTensor % 3), localExperts: 1 + (localExperts % 5) };
	const members = (1 + (ep % 4)) * shape.expertTensor;
	const experts = (members / shape.expertTensor) * shape.localExperts;
	const counts = Array.from({ length: members }, (_, member) => {
		const drawn = randomIntegers(2 * experts, 7919 * seed + member);
		// Many experts get nothing; a member may have no tokens at all.
		const silent = kind % 3 === 0 && member === quiet % members;
		return Int32Array.from({ length: experts }, (_, e) =>
			silent || drawn[experts + e]! % 3 === 0 ? 0 : drawn[e]! % (1 + (most % 9)),
		);
	});
	const sums = counts.map((one) => one.reduce((sum, rows) => sum + rows, 0));
	return { members, ...shape, counts, regionRows: Math.max(...sums) + (most % 3) };
}

function offsetsOf(counts: Int32Array): number[] {
	const offsets = [0];
	for (const count of counts) offsets.push(offsets.at(-1)! + count);
	return offsets;
}

function planOnDevice(one: Case, member: number, capacity: number) {
	const { members, expertTensor, localExperts, counts, regionRows } = one;
	const all = Int32Array.from(counts.flatMap(offsetsOf));
	using offsets = Tensor.from(device, all);
	const table = () => Tensor.from(device, new Int32Array(members * localExperts * 3).fill(-7));
	using outSend = table();
	using outReceive = table();
	using backSend = table();
	using backReceive = table();
	using localOffsets = Tensor.from(device, new Int32Array(localExperts + 1).fill(-7));
	using overflow = Tensor.from(device, Int32Array.of(3, 2));
	const sizes = { members, member, capacity };
	device.run("expert_exchange_plan", {
		offsets,
		out_send: outSend,
		out_receive: outReceive,
		back_send: backSend,
		back_receive: backReceive,
		local_offsets: localOffsets,
		overflow,
		...sizes,
		expert_tensor: expertTensor,
		local_experts: localExperts,
		region_rows: regionRows,
	});
	return {
		found: {
			outSend: outSend.toInt32(),
			outReceive: outReceive.toInt32(),
			backSend: backSend.toInt32(),
			backReceive: backReceive.toInt32(),
			localOffsets: localOffsets.toInt32(),
		},
		overflow: [...overflow.toInt32()],
		expected: expectedExchange(all, { ...sizes, expertTensor, localExperts, regionRows }),
	};
}

/** [here, there, rows] of a member's ranges. */
function rangesOf(table: Int32Array, member: number, localExperts: number): [number, number, number][] {
	return Array.from({ length: localExperts }, (_, local) => {
		const at = 3 * (member * localExperts + local);
		return [table[at]!, table[at + 1]!, table[at + 2]!];
	});
}

test(`${cases} random plans place every row where the host places it`, () => {
	for (let seed = 1; seed <= cases; seed++) {
		const one = randomCase(seed);
		const { members, expertTensor, localExperts, counts, regionRows } = one;
		const firsts = counts.map(offsetsOf);
		const plans = counts.map((_, member) => planOnHost(counts, member, one));
		// In every third case some rows have no room.
		const most = Math.max(...plans.map(({ sourceOfRow }) => sourceOfRow.length));
		const capacity = seed % 3 === 0 ? Math.floor(most / 2) : most + (seed % 2);
		const planned = plans.map((_, member) => planOnDevice(one, member, capacity));
		for (const [member, { sourceOfRow, received, offsets }] of plans.entries()) {
			const { found, expected, overflow } = planned[member]!;
			expect({ seed, ...found }).toEqual({ seed, ...expected });
			expect([...found.localOffsets]).toEqual([...offsets].map((row) => Math.min(row, capacity)));
			const needed = sourceOfRow.length;
			expect(overflow).toEqual(needed > capacity && needed > 3 ? [needed, capacity] : [3, 2]);
			// Row by row: the member's place among its source's rows, from the ranges and from the host's table.
			const rows = new Int32Array(Math.min(needed, capacity)).fill(-1);
			for (const source of counts.keys()) {
				const first = firsts[source]![Math.floor(member / expertTensor) * localExperts]!;
				for (const [here, there, count] of rangesOf(found.outReceive, source, localExperts)) {
					for (let i = 0; i < count; i++) rows[here + i] = received.offsets[source]! + there + i - first;
				}
			}
			expect([...rows]).toEqual([...sourceOfRow.subarray(0, capacity)]);
			// Two members' plans agree: the ranges that the first sends are those that the second receives.
			for (const other of counts.keys()) {
				const theirs = planned[other]!.found;
				const turned = (ranges: [number, number, number][]) => ranges.map(([here, there, n]) => [there, here, n]);
				const [sent, come] = [found.outSend, theirs.outReceive];
				expect(rangesOf(sent, other, localExperts)).toEqual(turned(rangesOf(come, member, localExperts)) as never);
				const [returned, back] = [found.backSend, theirs.backReceive];
				expect(rangesOf(returned, other, localExperts)).toEqual(turned(rangesOf(back, member, localExperts)) as never);
				// The way back is the way out, into the region of the member that sends.
				const region = (member % expertTensor) * regionRows;
				expect(rangesOf(found.backSend, other, localExperts)).toEqual(
					rangesOf(found.outReceive, other, localExperts).map(([here, there, n]) => [here, region + there, n]),
				);
			}
		}
		expect(members).toBe(counts.length);
	}
}, 120_000);

test("wrong sizes are refused", () => {
	const one: Case = {
		members: 2,
		expertTensor: 1,
		localExperts: 1,
		counts: [Int32Array.of(1, 1), Int32Array.of(1, 1)],
		regionRows: 2,
	};
	expect(() => planOnDevice({ ...one, expertTensor: 3 }, 0, 4)).toThrow("expert_exchange_plan");
	expect(() => planOnDevice(one, 2, 4)).toThrow("expert_exchange_plan");
	expect(() => planOnDevice(one, 0, -1)).toThrow("expert_exchange_plan");
});
