/**
 * Rank program of collectives.test.ts: every collective of every kind of group against a serial reference. Every rank
 * knows the values of all others (they are seeded), so each checks its own results. Prints a hash of all of them.
 */
import type { Group, Pending } from "../../src/parallel/group.ts";
import { World } from "../../src/parallel/world.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const digest = new Bun.CryptoHasher("sha256");

function same(what: string, actual: ArrayLike<number>, expected: ArrayLike<number>): void {
	if (actual.length !== expected.length) throw new Error(`${what}: ${actual.length} values, not ${expected.length}.`);
	for (let i = 0; i < expected.length; i++) {
		if (!Object.is(actual[i], expected[i])) {
			throw new Error(`rank ${world.rank}: ${what}[${i}] is ${actual[i]}, not ${expected[i]}.`);
		}
	}
}

/** Values of member `member` in test `seed`; wide enough in range that the order of additions shows. */
function held(seed: number, member: number, count: number): Float32Array {
	const values = randomValues(count, 1000 * seed + member);
	return values.map((value, i) => value * 10 ** ((i + member) % 5));
}

/** Σ over members in order, in fp32. */
function sum(parts: readonly Float32Array[]): Float32Array {
	return parts[0]!.map((first, i) => parts.slice(1).reduce((total, part) => Math.fround(total + part[i]!), first));
}

function check(tensor: Tensor, what: string, expected: Float32Array): void {
	const actual = tensor.toFloat32();
	digest.update(actual);
	same(what, actual, expected);
	tensor[Symbol.dispose]();
}

function reductions(group: Group, count: number, seed: number): void {
	const parts = group.ranks.map((_, member) => held(seed, member, count));
	const x = Tensor.from(device, parts[group.rank]!);
	group.allReduce(x).wait();
	check(x, `${group.name} all-reduce of ${count}`, sum(parts));

	const largest = Tensor.from(device, parts[group.rank]!);
	group.allReduce(largest, "max").wait();
	check(
		largest,
		`${group.name} max of ${count}`,
		parts[0]!.map((_, i) => Math.max(...parts.map((p) => p[i]!))),
	);

	const whole = group.ranks.map((_, member) => held(seed + 1, member, count * group.size));
	using from = Tensor.from(device, whole[group.rank]!);
	const part = Tensor.empty(device, [count]);
	group.reduceScatter(from, part).wait();
	check(
		part,
		`${group.name} reduce-scatter of ${count}`,
		sum(whole).subarray(group.rank * count, (group.rank + 1) * count),
	);

	// The result may lie in the input.
	const buffer = Tensor.from(device, whole[group.rank]!, [group.size, count]);
	const own = buffer.rowsFrom(count === 0 ? 0 : group.rank, count === 0 ? 0 : 1);
	if (count > 0) {
		group.reduceScatter(buffer, own).wait();
		group.allGather(own, buffer).wait();
		own[Symbol.dispose]();
		check(buffer, `${group.name} reduce-scatter and all-gather of ${count} in place`, sum(whole));
	}
}

function copies(group: Group, count: number, seed: number): void {
	const parts = group.ranks.map((_, member) => held(seed, member, count));
	using x = Tensor.from(device, parts[group.rank]!);
	const all = Tensor.empty(device, [group.size * count]);
	group.allGather(x, all).wait();
	check(all, `${group.name} all-gather of ${count}`, Float32Array.from(parts.flatMap((part) => [...part])));

	for (const root of group.ranks.keys()) {
		const y = Tensor.from(device, parts[group.rank]!);
		group.broadcast(y, root).wait();
		check(y, `${group.name} broadcast of ${count} from ${root}`, parts[root]!);
	}

	// Everybody to everybody, started in an order that would lock up if a send waited for its receive.
	const pending: Pending[] = [];
	const received: Tensor[] = [];
	const peers = group.ranks.map((_, member) => member).filter((member) => member !== group.rank);
	for (const peer of peers) pending.push(group.send(x, peer));
	for (const peer of peers) {
		const y = Tensor.empty(device, [count]);
		received.push(y);
		pending.push(group.receive(y, peer));
	}
	for (const call of pending) call.wait();
	for (const [i, peer] of peers.entries())
		check(received[i]!, `${group.name} message of ${count} from ${peer}`, parts[peer]!);
}

/** Member i sends (i + 2j) mod 5 × scale rows to member j, from overlapping ranges; some send nothing at all. */
function allToAll(group: Group, scale: number, seed: number): void {
	const width = 3;
	const rowsFromTo = (from: number, to: number) => ((from + 2 * to) % 5) * scale;
	const members = group.ranks.map((_, member) => member);
	const rows = 4 * scale + members.length;
	const x = members.map((member) => held(seed, member, rows * width));
	using send = Tensor.from(device, x[group.rank]!, [rows, width]);
	const counts = members.map((member) => rowsFromTo(member, group.rank));
	const offsets = counts.map((_, i) => counts.slice(0, i).reduce((a, b) => a + b, 0));
	const total = counts.reduce((a, b) => a + b, 0);
	const receive = Tensor.empty(device, [total, width]);
	group
		.allToAll(send, { offsets: members, counts: members.map((member) => rowsFromTo(group.rank, member)) }, receive, {
			offsets,
			counts,
		})
		.wait();
	const expected = members.flatMap((from) => [
		...x[from]!.subarray(group.rank * width, (group.rank + rowsFromTo(from, group.rank)) * width),
	]);
	check(receive, `${group.name} all-to-all of ${scale}`, Float32Array.from(expected));
}

function otherTypes(group: Group): void {
	const count = 1003;
	const parts = group.ranks.map((_, member) => held(77, member, count));
	using bf16 = Tensor.from(device, parts[group.rank]!, [count], { dtype: "bf16" });
	const wide = group.ranks.map((_, member) => {
		using y = Tensor.from(device, parts[member]!, [count], { dtype: "bf16" });
		return y.toFloat32();
	});
	group.allReduce(bf16).wait();
	using expected = Tensor.from(device, sum(wide), [count], { dtype: "bf16" });
	same(`${group.name} bf16 sum`, bf16.toFloat32(), expected.toFloat32());

	const doubles = group.ranks.map((_, member) => Float64Array.from(held(78, member, count), (v) => v * Math.PI));
	using f64 = Tensor.from(device, doubles[group.rank]!);
	group.allReduce(f64).wait();
	const host = new Float64Array(count);
	device.copyToHost(host, f64);
	const doubleSum = doubles[0]!.map((first, i) => doubles.slice(1).reduce((total, part) => total + part[i]!, first));
	same(`${group.name} f64 sum`, host, doubleSum);

	const integers = group.ranks.map((_, member) => Int32Array.from({ length: 7 }, (_, i) => (member + 1) * 1e9 + i));
	using i32 = Tensor.from(device, integers[group.rank]!);
	group.allReduce(i32).wait();
	const integerSum = integers[0]!.map((first, i) =>
		integers.slice(1).reduce((total, part) => (total + part[i]!) | 0, first),
	);
	same(`${group.name} i32 sum`, i32.toInt32(), integerSum);

	// NCCL's maximum of a NaN and a number is the number.
	const odd = device.library.kind === "cuda" && place.backend === "nccl" ? 6 : Number.NaN;
	using most = Tensor.from(device, Float32Array.of(group.rank === 1 ? odd : 5, group.rank));
	group.allReduce(most, "max").wait();
	same(`${group.name} maximum with ${odd}`, most.toFloat32(), [odd, group.size - 1]);

	const told = group.exchange(Int32Array.of(group.rank, 10 * group.rank, -1));
	for (const [member, values] of told.entries()) same(`${group.name} exchange`, values, [member, 10 * member, -1]);
	// One member after the other only gives, which it may do before the others have begun; its values are its own again.
	for (let giver = 0; giver < group.size; giver++) {
		for (const round of [0, 1, 2, 3]) {
			const own = Int32Array.of(group.rank, giver, round);
			if (group.rank === giver) group.contribute(own);
			const answers = group.rank === giver ? [] : group.exchange(own);
			own.fill(-1);
			for (const [member, values] of answers.entries()) same(`${group.name} tell`, values, [member, giver, round]);
		}
	}
	group.barrier();
}

/** Calls of two groups, started in orders that differ by rank, and waited for in others. */
function interleaved(first: Group, second: Group, count: number, seed: number): void {
	const groups = world.rank % 2 === 0 ? [first, second] : [second, first];
	const started = groups.flatMap((group) =>
		[0, 1, 2].map((i) => {
			const x = Tensor.from(device, held(seed + i, group.rank, count));
			return { group, i, x, pending: group.allReduce(x) };
		}),
	);
	for (const { group, i, x, pending } of world.rank % 3 === 0 ? started.toReversed() : started) {
		pending.wait();
		check(
			x,
			`${group.name} call ${i} among others`,
			sum(group.ranks.map((_, member) => held(seed + i, member, count))),
		);
	}
}

const everyone = Array.from({ length: world.size }, (_, rank) => rank);
const groups = [await world.group("world", everyone)];
const even = everyone.filter((rank) => rank % 2 === world.rank % 2);
groups.push(await world.group("parity", even));
// A group may have any order.
groups.push(await world.group("reversed", everyone.toReversed()));

for (const group of groups) {
	for (const [i, count] of [0, 1, 17, 1024, 8192, 8193, 20_003, 160_001].entries()) {
		if (count <= 8193 || group === groups[0]) {
			reductions(group, count, 10 * i);
			copies(group, count, 10 * i + 5);
		}
	}
	for (const scale of [0, 1, 50, 8000]) allToAll(group, scale, 200 + scale);
	if (group.size > 1) otherTypes(group);
}
for (const count of [10, 30_000]) interleaved(groups[0]!, groups[2]!, count, 900 + count);
const leaked = device.memoryStatistics().liveBytes;
if (leaked !== 0) throw new Error(`${leaked} bytes of device memory leaked.`);
console.log(digest.digest("hex"));
