/**
 * Rank program of hierarchical-rows.test.ts: layers of experts over ranks that are played as nodes. Rows go to a node once, to all
 * ranks, or to each expert. Compares outputs and gradients, and counts the rows that really leave for other nodes.
 */

import { AllGatherDispatcher } from "../../src/models/language/token-dispatcher/all-gather.ts";
import { AllToAllDispatcher } from "../../src/models/language/token-dispatcher/all-to-all.ts";
import type { ExpertRows, TokenDispatcher } from "../../src/models/language/token-dispatcher/dispatcher.ts";
import { HierarchicalDispatcher } from "../../src/models/language/token-dispatcher/hierarchical.ts";
import type { ExchangeMembers } from "../../src/parallel/experts/members.ts";
import type { Group } from "../../src/parallel/group.ts";
import { World } from "../../src/parallel/world.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { ExpertOrder } from "../../src/tensor/ops/permute.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { dtypeBytes, type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues, relativeRms } from "../support.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const everyone = Array.from({ length: world.size }, (_, rank) => rank);

/** A group that counts the bytes of experts' rows which go to ranks of other nodes. */
function counting(group: Group, ranksPerNode: number, counted: { bytes: number }): Group {
	const nodeOf = (rank: number) => Math.floor(rank / ranksPerNode);
	return new Proxy(group, {
		get: (of, name) => {
			const value = Reflect.get(of, name, of);
			if (name !== "exchangeRows") return typeof value === "function" ? value.bind(of) : value;
			return (...given: Parameters<Group["exchangeRows"]>) => {
				const [send, , ranges] = given;
				const rowBytes = [send.rows, send.beside].reduce((sum, x) => sum + (x ? x.width * dtypeBytes[x.dtype] : 0), 0);
				const out = ranges.out.toInt32();
				const perMember = out.length / of.size;
				for (let at = 2; at < out.length; at += 3) {
					const to = of.ranks[Math.floor(at / perMember)]!;
					if (nodeOf(to) !== nodeOf(world.rank)) counted.bytes += out[at]! * rowBytes;
				}
				return of.exchangeRows(...given);
			};
		},
	});
}

/** An expert's output for a row: it differs from every other, and its parts add up. */
function playExperts(tape: Tape, arrived: ExpertRows, firstExpert: number, part: number): Tensor {
	const { rows, rowProbability } = arrived;
	const offsets = arrived.offsets.toInt32();
	const live = offsets.at(-1)!;
	const factor = new Float32Array(live);
	for (let local = 0; local + 1 < offsets.length; local++) {
		factor.fill(1 + 0.1 * (firstExpert + local) + 0.01 * part, offsets[local]!, offsets[local + 1]!);
	}
	const { width } = rows;
	const x = rows.toFloat32();
	const p = rowProbability.toFloat32();
	const scaled = (values: Float32Array, weights: Float32Array) => {
		const y = new Float32Array(rows.rows * width);
		for (let row = 0; row < live; row++) {
			for (let i = row * width; i < (row + 1) * width; i++) y[i] = values[i]! * weights[row]! * factor[row]!;
		}
		return Tensor.from(device, y, [rows.rows, width], { dtype: rows.dtype as FloatDtype, tag: "activation" });
	};
	const outputs = tape.output(scaled(x, p), true);
	tape.record({
		name: "experts",
		outputs: [outputs],
		backward: ([gradient]) => {
			const dy = gradient!.toFloat32();
			rows.gradient!.accumulate(scaled(dy, p));
			const weights = new Float32Array(rows.rows);
			for (let row = 0; row < live; row++) {
				let sum = 0;
				for (let i = row * width; i < (row + 1) * width; i++) sum += dy[i]! * x[i]!;
				weights[row] = sum * factor[row]!;
			}
			rowProbability.gradient!.accumulate(Tensor.from(device, weights, rowProbability.shape));
		},
	});
	return outputs;
}

/** How rows go. */
type Way = "direct" | "nodes" | "gathered";

interface Case {
	readonly ranksPerNode: number;
	readonly expertTensor: number;
	readonly localExperts: number;
	readonly tokens: number;
	readonly topk: number;
	readonly width: number;
	readonly dtype: FloatDtype;
	readonly bound: number | null;
	/** Whether members know how many tokens any of them has. */
	readonly agreed: boolean;
	/** One of this many slots is dropped; 0: no slot. */
	readonly dropped: number;
}

/** Rows and bytes that a rank has counted in a case. */
export interface SentBytes {
	/** Rows of its tokens that have to leave its node: one for each expert elsewhere, or for each node. */
	readonly rows: { readonly direct: number; readonly nodes: number };
	readonly rowBytes: number;
	readonly besideBytes: { readonly direct: number; readonly nodes: number };
	/** Bytes that it has sent to other nodes, also for other ranks' tokens. */
	readonly sent: Readonly<Record<"direct" | "nodes", { readonly forward: number; readonly backward: number }>>;
}

function choicesOf({ tokens, topk, dropped }: Case, experts: number, seed: number): Int32Array {
	const noise = randomValues(tokens * experts, 100 * seed + world.rank);
	return Int32Array.from(
		Array.from({ length: tokens }, (_, t) => {
			const own = noise.subarray(t * experts, (t + 1) * experts);
			return [...own.keys()].sort((a, b) => own[b]! - own[a]!).slice(0, topk);
		}).flat(),
		(expert, slot) => (dropped > 0 && slot % dropped === 0 ? -1 : expert),
	);
}

/** Dispatch, experts and combine, forward and backward. */
function pass(one: Case, values: Record<"x" | "p" | "dy", Float32Array>, start: typeof open, kind: Way) {
	const { tokens, topk, width, dtype } = one;
	const slotted = (x: Float32Array, shape: number[], of: FloatDtype) => {
		using plain = Tensor.from(device, x, shape, { dtype: of });
		return plain.withGradient(new GradientSlot(device, shape, of));
	};
	const tape = new Tape(device, { recording: true, training: one.agreed });
	using u = slotted(values.x, [tokens, width], dtype);
	using probabilities = slotted(values.p, [tokens, topk], "f32");
	const counted = { bytes: 0 };
	using dispatcher = start(one, tape, u, probabilities, kind, counted);
	{
		using arrived = dispatcher.finishDispatch();
		const local = Math.floor(world.rank / one.expertTensor) * one.localExperts;
		using outputs = playExperts(tape, arrived, local, world.rank % one.expertTensor);
		dispatcher.startCombine(outputs);
	}
	using y = dispatcher.finishCombine();
	const forward = counted.bytes;
	y.gradient!.accumulate(Tensor.from(device, values.dy, [tokens, width], { dtype }));
	tape.backward();
	using du = u.gradient!.take()!;
	using dp = probabilities.gradient!.take()!;
	return { y: y.toFloat32(), du: du.toFloat32(), dp: dp.toFloat32(), forward, backward: counted.bytes - forward };
}

let chosen: Int32Array;
const groups = { all: await world.group("all", everyone), nodes: new Map<number, { between: Group; within: Group }>() };
for (const ranksPerNode of [1, 2]) {
	const members = Array.from({ length: world.size / ranksPerNode }, (_, node) => node);
	const node = Math.floor(world.rank / ranksPerNode);
	const within = everyone.slice(node * ranksPerNode).slice(0, ranksPerNode);
	const between = members.map((one) => one * ranksPerNode + (world.rank % ranksPerNode));
	groups.nodes.set(ranksPerNode, {
		within: await world.group(`within ${ranksPerNode}`, within),
		between: await world.group(`between ${ranksPerNode}`, between),
	});
}

function open(
	one: Case,
	tape: Tape,
	u: Tensor,
	probabilities: Tensor,
	kind: Way,
	counted: { bytes: number },
): TokenDispatcher {
	const { expertTensor, localExperts, ranksPerNode, topk, tokens } = one;
	using expertIndex = Tensor.from(device, chosen, [tokens, topk]);
	const seen = (group: Group) => counting(group, ranksPerNode, counted);
	const capacity = { bound: one.bound, mostTokens: one.agreed ? 24 : null };
	const members: ExchangeMembers = { group: seen(groups.all), expertTensor, localExperts, capacity };
	if (kind === "nodes") {
		const { within, between } = groups.nodes.get(ranksPerNode)!;
		const nodes = { within: seen(within), between: seen(between) };
		return new HierarchicalDispatcher(tape, u, { expertIndex, probabilities }, { ...members, nodes }, null, null);
	}
	if (kind === "gathered") return new AllGatherDispatcher(tape, u, { expertIndex, probabilities }, members, null);
	const order = ExpertOrder.of(device, expertIndex, (world.size / expertTensor) * localExperts);
	return new AllToAllDispatcher(tape, u, { probabilities }, order, members, null);
}

const usual = {
	ranksPerNode: 2,
	expertTensor: 1,
	localExperts: 3,
	tokens: 24,
	topk: 4,
	width: 17,
	dropped: 0,
} as const;
const cases: readonly Case[] = [
	{ ...usual, dtype: "f32", bound: null, agreed: true },
	{ ...usual, dtype: "bf16", bound: null, agreed: true, dropped: 5 },
	{ ...usual, dtype: "f32", bound: 4, agreed: true, tokens: 24 - world.rank },
	{ ...usual, dtype: "f32", bound: null, agreed: false, tokens: 5 * world.rank, dropped: 3 },
	{ ...usual, dtype: "f32", bound: null, agreed: true, expertTensor: 2, localExperts: 4 },
	{ ...usual, dtype: "f32", bound: null, agreed: true, ranksPerNode: 1, localExperts: 5 },
	{ ...usual, dtype: "f32", bound: null, agreed: false, tokens: 700, width: 5, topk: 6, localExperts: 8 },
];
const found: SentBytes[] = [];
for (const [seed, one] of cases.entries()) {
	const { tokens, topk, width, localExperts, expertTensor, ranksPerNode, dtype } = one;
	const experts = (world.size / expertTensor) * localExperts;
	chosen = choicesOf(one, experts, seed);
	const own = (count: number, what: number) => randomValues(count, 1000 * seed + 10 * world.rank + what);
	const values = { x: own(tokens * width, 1), p: own(tokens * topk, 2), dy: own(tokens * width, 3) };
	const direct = pass(one, values, open, "direct");
	const nodes = pass(one, values, open, "nodes");
	const gathered = pass(one, values, open, "gathered");
	for (const name of ["y", "du", "dp"] as const) {
		// In bf16 the sum of a node, or of a rank, is rounded before it returns.
		const tolerance = dtype === "bf16" && name !== "dp" ? 6e-3 : 2e-6;
		for (const [kind, other] of Object.entries({ nodes, gathered })) {
			const error = relativeRms(other[name], direct[name]);
			if (!(error <= tolerance)) throw new Error(`case ${seed}: ${name} of ${kind} is off by ${error}.`);
		}
	}
	for (const [kind, first] of [
		["nodes", nodes],
		["gathered", gathered],
	] as const) {
		const again = pass(one, values, open, kind);
		for (const name of ["y", "du", "dp"] as const) {
			if (first[name].some((value, i) => !Object.is(value, again[name][i])))
				throw new Error(`${name} does not repeat.`);
		}
	}
	// Rows that have to leave: of each expert on another node, of each other node with any.
	const nodeExperts = (ranksPerNode / expertTensor) * localExperts;
	const ownNode = Math.floor(world.rank / ranksPerNode);
	const leaving = { direct: 0, nodes: 0 };
	for (let token = 0; token < tokens; token++) {
		const away = [...chosen.subarray(token * topk, (token + 1) * topk)]
			.filter((expert) => expert >= 0)
			.map((expert) => Math.floor(expert / nodeExperts))
			.filter((node) => node !== ownNode);
		leaving.direct += away.length * expertTensor;
		leaving.nodes += new Set(away).size;
	}
	found.push({
		rows: leaving,
		rowBytes: width * (dtype === "bf16" ? 2 : 4),
		besideBytes: { direct: 4, nodes: 8 * topk },
		sent: {
			direct: { forward: direct.forward, backward: direct.backward },
			nodes: { forward: nodes.forward, backward: nodes.backward },
		},
	});
}
const { liveBytes, liveBytesByTag } = device.memoryStatistics();
const leaked = liveBytes - liveBytesByTag.communication;
if (leaked !== 0) throw new Error(`${leaked} bytes of device memory leaked.`);
console.log(JSON.stringify(found));
