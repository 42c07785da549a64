/**
 * Rank program of expert-exchange.ts: experts' rows to the ranks that hold them and back, planned by the device and by the
 * host, in turns; rank 0 prints the least seconds of each as JSON.
 */
import { Exchange, startCombine, startDispatch } from "../../src/parallel/experts/all-to-all.ts";
import { World } from "../../src/parallel/world.ts";
import { ExpertOrder } from "../../src/tensor/ops/permute.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { HostExchange } from "../parallel/host-exchange.ts";
import { deviceOfRank, placeOfRank } from "../parallel/ranks.ts";
import { randomValues } from "../support.ts";

const [tokens, topk, experts, width] = process.argv.slice(2).map(Number) as [number, number, number, number];
const rounds = 12;
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const everyone = Array.from({ length: world.size }, (_, rank) => rank);
const group = await world.group("world", everyone);
const localExperts = experts / world.size;
const parallel = { group, expertTensor: 1, localExperts, capacity: { bound: null, mostTokens: tokens } };

const chosen = randomValues(tokens * topk, 1 + place.rank).map((value) => ((value + 1) / 2) * experts);
using expertIndex = Tensor.from(device, Int32Array.from(chosen, Math.floor), [tokens, topk]);
using order = ExpertOrder.of(device, expertIndex, experts);
using rows = Tensor.from(device, randomValues(tokens * topk * width, 9), [tokens * topk, width], { dtype: "bf16" });
using weights = Tensor.from(device, randomValues(tokens * topk, 10));
using matrix = weights.view([tokens * topk, 1]);
const tape = new Tape(device, { recording: false, training: true });

function planned(): void {
	using exchange = Exchange.plan(tape, order, parallel, null);
	using dispatch = startDispatch(tape, { rows, beside: weights }, exchange);
	const come = dispatch.finish();
	using outputs = come.rows;
	using _beside = come.beside!;
	using combine = startCombine(tape, outputs, exchange);
	using _back = combine.finish().rows;
}

function byHost(): void {
	using exchange = HostExchange.plan(group, order.offsets, parallel);
	using outputs = exchange.dispatch(rows);
	using _beside = exchange.dispatch(matrix);
	using _back = exchange.combine(outputs);
}

/** The least work for every row: it is read once and written once, each way, by all ranks at the same time. */
function copies(): void {
	using there = Tensor.empty(device, [tokens * topk, width], "bf16");
	using back = Tensor.empty(device, [tokens * topk, width], "bf16");
	device.copy(there, rows, rows.bytes);
	device.copy(back, there, rows.bytes);
}

const sides = { planned, byHost, copies };
const least: Record<string, number> = {};
for (let round = 0; round < rounds; round++) {
	for (const [name, side] of Object.entries(sides)) {
		device.synchronize();
		group.barrier();
		const started = performance.now();
		side();
		device.synchronize();
		group.barrier();
		const seconds = (performance.now() - started) / 1000;
		if (round > 0) least[name] = Math.min(least[name] ?? Number.POSITIVE_INFINITY, seconds);
	}
}
if (world.rank === 0) console.log(JSON.stringify(least));
