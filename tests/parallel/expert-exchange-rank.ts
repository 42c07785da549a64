/**
 * Rank program of expert-exchange.test.ts: random exchanges among an even number of ranks, forward and backward, against the exchange
 * that the host plans, bit for bit; and one that has no room. Prints what the rank found.
 */
import { Exchange, startCombine, startDispatch } from "../../src/parallel/experts/all-to-all.ts";
import type { ExchangeMembers } from "../../src/parallel/experts/members.ts";
import type { Group } from "../../src/parallel/group.ts";
import { World } from "../../src/parallel/world.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { ExpertOrder } from "../../src/tensor/ops/permute.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";
import { HostExchange } from "./host-exchange.ts";
import { deviceOfRank, placeOfRank } from "./ranks.ts";

using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const everyone = Array.from({ length: world.size }, (_, rank) => rank);
const group = await world.group("world", everyone);
const pairs = await world.group("pair", everyone.slice(world.rank - (world.rank % 2)).slice(0, 2));

interface Shape {
	readonly group: Group;
	readonly expertTensor: number;
	readonly localExperts: number;
	readonly tokens: number;
	readonly topk: number;
	readonly width: number;
	readonly dtype: FloatDtype;
	/** The expert that a random number of [0, 1) chooses. */
	readonly choose: (random: number, experts: number) => number;
	/** Whether the members' hosts agree on the tokens beforehand. */
	readonly agreed: boolean;
}

function random(count: number, seed: number): Float32Array {
	return randomValues(count, 1000 * seed + world.rank);
}

/** The live rows of `actual`, which come first, are those of `expected`. */
function same(what: string, actual: Tensor, expected: Tensor): void {
	const [found, wanted] = [actual.toFloat32(), expected.toFloat32()];
	for (let i = 0; i < wanted.length; i++) {
		if (!Object.is(found[i], wanted[i])) throw new Error(`${what}[${i}] is ${found[i]}, not ${wanted[i]}.`);
	}
}

function withSlot(value: Tensor): Tensor {
	const slotted = value.withGradient(new GradientSlot(device, value.shape, value.dtype as FloatDtype));
	value[Symbol.dispose]();
	return slotted;
}

/** Rows and weights through the experts' ranks and back, and gradients the other way: as the host's exchange has them. */
function compare(shape: Shape, seed: number): void {
	const { group: members, expertTensor, localExperts, tokens, topk, width, dtype, choose } = shape;
	const experts = (members.size / expertTensor) * localExperts;
	const slots = tokens * topk;
	const chosen = Int32Array.from(random(slots, seed), (value) => choose((value + 1) / 2, experts));
	// A token goes to an expert once.
	for (let i = 1; i < slots; i += 2) if (chosen[i] === chosen[i - 1]) chosen[i] = experts - 1 - chosen[i]!;
	for (let i = 1; i < slots; i += 2) if (chosen[i] === chosen[i - 1]) chosen[i] = -1;
	using expertIndex = Tensor.from(device, chosen, [tokens, topk]);
	using order = ExpertOrder.of(device, expertIndex, experts);
	const mostTokens = shape.agreed ? 16 : null;
	const parallel: ExchangeMembers = {
		group: members,
		expertTensor,
		localExperts,
		capacity: { bound: null, mostTokens },
	};
	const values = (count: number, what: number) => random(count, 10 * seed + what);
	const matrix = (rows: number, what: number) =>
		Tensor.from(device, values(rows * width, what), [rows, width], { dtype });

	using host = HostExchange.plan(members, order.offsets, parallel);
	const tape = new Tape(device, { recording: true });
	using rows = withSlot(matrix(slots, 1));
	using weights = withSlot(Tensor.from(device, values(slots, 2)));
	using exchange = Exchange.plan(tape, order, parallel, null);
	using dispatch = startDispatch(tape, { rows, beside: weights }, exchange);
	const come = dispatch.finish() as { readonly rows: Tensor; readonly beside: Tensor };
	using arrived = come.rows;
	using arrivedWeights = come.beside;

	using liveRows = rows.rowsFrom(0, host.sentRows);
	using column = weights.view([slots, 1]);
	using liveWeights = column.rowsFrom(0, host.sentRows);
	using wantedRows = host.dispatch(liveRows);
	using wantedWeights = host.dispatch(liveWeights);
	if (String(exchange.offsets.toInt32()) !== String(host.offsets.toInt32())) throw new Error("offsets differ");
	same("dispatched rows", arrived, wantedRows);
	same("dispatched weights", arrivedWeights, wantedWeights);

	// The experts' outputs are another matrix, of another width.
	using outputs = withSlot(matrix(exchange.capacity, 3));
	using combine = startCombine(tape, outputs, exchange);
	using back = combine.finish().rows;
	using liveOutputs = outputs.rowsFrom(0, host.receivedRows);
	using wantedBack = host.combine(liveOutputs);
	same("combined rows", back, wantedBack);

	// Gradients go the other way.
	using gradient = matrix(slots, 4);
	using ofRows = matrix(exchange.capacity, 5);
	using ofWeights = Tensor.from(device, values(exchange.capacity, 6));
	back.gradient!.accumulate(gradient.share());
	arrived.gradient!.accumulate(ofRows.share());
	arrivedWeights.gradient!.accumulate(ofWeights.share());
	tape.backward();
	using outputsGradient = outputs.gradient!.take()!;
	using rowsGradient = rows.gradient!.take()!;
	using weightsGradient = weights.gradient!.take()!;
	using sentGradient = gradient.rowsFrom(0, host.sentRows);
	using wantedOutputsGradient = host.dispatch(sentGradient);
	same("gradient of outputs", outputsGradient, wantedOutputsGradient);
	using comeGradient = ofRows.rowsFrom(0, host.receivedRows);
	using wantedRowsGradient = host.combine(comeGradient);
	same("gradient of rows", rowsGradient, wantedRowsGradient);
	using ofWeightsColumn = ofWeights.view([exchange.capacity, 1]);
	using comeWeights = ofWeightsColumn.rowsFrom(0, host.receivedRows);
	using wantedWeightsGradient = host.combine(comeWeights);
	same("gradient of weights", weightsGradient, wantedWeightsGradient);
}

/** Rows beyond an expert's room are not sent and are counted; the combined output is that of the other rows. */
function overflow(): string {
	const [tokens, topk, localExperts] = [8, 2, 2];
	const experts = localExperts * group.size;
	// All rows go to the experts of rank 1.
	using expertIndex = Tensor.from(
		device,
		new Int32Array(tokens * topk).map((_, i) => 2 + (i % 2)),
		[tokens, topk],
	);
	using order = ExpertOrder.of(device, expertIndex, experts);
	using noted = Tensor.zeros(device, [2], "i32");
	const parallel = { group, expertTensor: 1, localExperts, capacity: { bound: 1.5, mostTokens: 8 } };
	const tape = new Tape(device, { recording: false, training: true });
	using exchange = Exchange.plan(tape, order, parallel, noted);
	using rows = Tensor.from(device, random(tokens * topk * 3, 5), [tokens * topk, 3]);
	using dispatch = startDispatch(tape, { rows, beside: null }, exchange);
	using come = dispatch.finish().rows;
	using combine = startCombine(tape, come, exchange);
	using _back = combine.finish().rows;
	return `${noted.toInt32()} of ${exchange.capacity}`;
}

const shapes: readonly [group: Group, expertTensor: number, localExperts: number][] = [
	[group, 1, 3],
	[group, 2, 2],
	[group, world.size, 5],
	[pairs, 1, 1],
	[pairs, 2, 4],
];
const choices: readonly Shape["choose"][] = [
	(random, experts) => Math.floor(random * experts),
	// Some experts get everything, some slots are dropped.
	(random, experts) => Math.floor(random ** 4 * experts) - (random > 0.9 ? 1000 : 0),
	() => 0,
	// This rank's tokens go nowhere.
	(random, experts) => (world.rank === 1 ? -1 : Math.floor(random * experts)),
];
let seed = 0;
for (const [members, expertTensor, localExperts] of shapes) {
	for (const choose of choices) {
		for (const dtype of ["f32", "bf16"] as const) {
			for (const width of [1, 7, 300]) {
				const agreed = seed % 2 === 0;
				// Where hosts ask each other, members may have different numbers of tokens, also none.
				const tokens = agreed ? 16 - (seed % 3) * world.rank : (seed * (world.rank + 1)) % 13;
				compare({ group: members, expertTensor, localExperts, tokens, topk: 2, width, dtype, choose, agreed }, ++seed);
			}
		}
	}
}
const found = { cases: seed, overflow: overflow(), transport: group.rowTransport() };
// The groups keep the windows through which other GPUs read.
const { liveBytes, liveBytesByTag } = device.memoryStatistics();
const leaked = liveBytes - liveBytesByTag.communication;
if (leaked !== 0) throw new Error(`${leaked} bytes of device memory leaked.`);
console.log(JSON.stringify(found));
