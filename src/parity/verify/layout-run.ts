/**
 * Runs a layout for `mimo verify`: each rank compares its part with the reference, and the sums over all ranks are the result.
 */
import { featuresOf } from "../../data/microbatch.ts";
import { visionModule, type World } from "../../parallel/index.ts";
import { elementCount, type Tensor } from "../../tensor/index.ts";
import { reduceHost } from "../probe-sums.ts";
import { type Engine, type EngineOptions, openEngine } from "./engine.ts";
import { type ClampFlips, ClampMeter, OperandReplay, type ReplayedOperands } from "./operands.ts";
import { type Kind, realSteps, type Scalars, type StoredReference, scalarsOf, updateAlone } from "./reference.ts";
import type { Flip } from "./routing.ts";
import { type Plan, participants } from "./samples.ts";
import { plainOrder, type Subject } from "./subject.ts";

/** The difference of a tensor from the reference's. */
export interface Difference {
	/** Root mean square of the difference, of the copy that counts. */
	readonly rms: number;
	/** The largest of the other copies. */
	readonly copies: number;
	/** Elements that are not the same bit for bit. */
	readonly different: number;
}

/** Difference between an order of work and the plain one. */
export type Reordering = "late weight gradients" | "passes in turns";

/** Elements that differ between two ways to train: gradients of step 1, weights after the real steps, on all ranks. */
export interface Unequal {
	readonly gradients: number;
	readonly weights: number;
}

export interface LayoutResult {
	readonly scalars: Scalars;
	/** In the order of the reference's tensors. */
	readonly differences: Readonly<Record<Kind, readonly Difference[]>>;
	/**
	 * Between ZeRO-1 (reduced in buckets during backward) and none (after it; with NCCL in the same buckets).
	 */
	readonly zero: Unequal;
	/** Between the subject's order of work and the plain one; null: they are one. */
	readonly reordered: ({ readonly what: Reordering } & Unequal) | null;
	/** How many tokens were sent to other experts in step 1, and the first of them on every rank. */
	readonly flips: { readonly count: number; readonly first: readonly Flip[] };
	/** Values that experts round to e4m3 in step 1, whose operands are the reference's; null: they do not round. */
	readonly operands: ReplayedOperands | null;
	/** Values at the edge of a clamp in step 1. */
	readonly clampFlips: ClampFlips;
	/** Encoder ranks with images in step 1: as the step counted them, and as the samples were dealt out. */
	readonly participants: { readonly counted: number; readonly expected: number };
	/** Wall clock of all of it. */
	readonly seconds: number;
}

/** Every rank of the layout calls this together; all get the result. */
export async function runLayout(
	world: World,
	plan: Plan,
	subject: Subject,
	reference: StoredReference,
): Promise<LayoutResult> {
	const started = performance.now();
	// In an order that depends on the place in the buffer, sums are equal bit for bit in equal buffers alone.
	const plainly = { buckets: !world.addsInRankOrder };
	const plain = await trainSteps(world, plan, subject, reference, plainly);
	const { result, gradient, stepped, flips, operands, clampFlips } = plain;
	using engine = plain.engine;
	const zero = await trainSteps(world, plan, subject, reference, { distributedOptimizer: true, buckets: true });
	using _sharded = zero.engine;
	const unequal = (other: typeof plain): Unequal => ({
		gradients: countUnequal(engine, plain.snapshots.gradients, other.snapshots.gradients),
		weights: countUnequal(engine, plain.snapshots.weights, other.snapshots.weights),
	});
	let reordered: LayoutResult["reordered"] = null;
	const what = reorderingOf(subject);
	if (what !== null) {
		const other = await trainSteps(world, plan, subject, reference, { ...plainly, order: plainOrder });
		using _other = other.engine;
		reordered = { what, ...unequal(other) };
	}
	const { clipFactor } = reference.description;
	updateAlone(engine, subject, { gradientOf: (name) => reference.values("gradient", name)!, clipFactor });
	const updated = compare(engine, reference, "updated");
	return {
		scalars: scalarsOf(result),
		differences: { gradient, updated, stepped },
		zero: unequal(zero),
		reordered,
		flips,
		operands,
		clampFlips,
		participants: {
			counted: result.participation?.participants ?? 0,
			expected: participants(
				plan,
				subject.samples.map((sample) => featuresOf(sample, visionModule).grids.length > 0),
			),
		},
		seconds: (performance.now() - started) / 1000,
	};
}

function reorderingOf({ order: { overlap, lateWeightGradients } }: Subject): Reordering | null {
	if (overlap !== null) return "passes in turns";
	return lateWeightGradients ? "late weight gradients" : null;
}

/** The real steps. The receiver disposes the engine. */
async function trainSteps(
	world: World,
	plan: Plan,
	subject: Subject,
	reference: StoredReference,
	options: EngineOptions,
) {
	const engine = await openEngine(world, plan, subject, options);
	engine.restart();
	const given = reference.operands();
	const replay = given.size > 0 ? new OperandReplay(given) : null;
	const clamps = new ClampMeter();
	engine.observe((model) => ({ ...replay?.probe(model), ...clamps.probe(model) }));
	let gradient: Difference[] = [];
	let gradients: Uint32Array[] = [];
	const result = engine.step(() => {
		for (const replica of engine.state.replicas) replica.gatherGradients();
		gradient = compare(engine, reference, "gradient");
		gradients = bitsOf(engine, "gradient");
	});
	engine.observe(null);
	world.progress(1);
	const { device } = engine.state.scalars;
	const operands = replay?.result(engine.world, device) ?? null;
	const clampFlips = clamps.flips(reference.clampCounts(), engine.world, device);
	const flips = findFlips(engine, plan, subject, reference);
	for (let step = 1; step < realSteps; step++) engine.step();
	world.progress(realSteps);
	const stepped = compare(engine, reference, "stepped");
	const snapshots = { gradients, weights: bitsOf(engine, "value") };
	return { engine, result, gradient, stepped, flips, operands, clampFlips, snapshots };
}

/** Differences of all tensors, summed over the ranks that hold their parts. */
export function compare(engine: Engine, reference: StoredReference, kind: Kind): Difference[] {
	const { tensors } = reference.description;
	const index = new Map(tensors.map(({ name }, at) => [name, at]));
	// Σ difference², differing elements, elements compared.
	const sums = new Float64Array(3 * tensors.length);
	const copies = new Float64Array(tensors.length);
	for (const tensor of engine.tensors()) {
		const { name, shape, value, gradient, blocks } = tensor;
		const part = kind === "gradient" ? gradient : value;
		const expected = part && reference.values(kind, name);
		if (part && expected) {
			const at = index.get(name)!;
			const found = difference(part, expected, elementCount(shape.slice(1)), blocks);
			if (engine.counts(tensor)) {
				sums[3 * at]! += found.squares;
				sums[3 * at + 1]! += found.different;
				sums[3 * at + 2]! += found.elements;
			} else {
				copies[at] = Math.max(copies[at]!, Math.sqrt(found.squares / Math.max(1, found.elements)));
			}
		}
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	reduceHost(engine.world, engine.state.scalars.device, sums, "sum");
	reduceHost(engine.world, engine.state.scalars.device, copies, "max");
	return tensors.map(({ name, elements }, at) => {
		const compared = sums[3 * at + 2]!;
		if (compared !== elements && !(kind === "gradient" && compared === 0)) {
			throw new Error(`The ranks that count ${name} hold ${compared} of its ${elements} elements.`);
		}
		return { rms: Math.sqrt(sums[3 * at]! / elements), copies: copies[at]!, different: sums[3 * at + 1]! };
	});
}

/** A rank's blocks against the whole tensor [rows, width]. */
function difference(
	part: Tensor,
	expected: Float32Array,
	width: number,
	blocks: Parameters<Engine["counts"]>[0]["blocks"],
) {
	const values = part.toFloat32();
	let [squares, different, elements] = [0, 0, 0];
	for (const { localRow, fullRow, rows, localColumn, fullColumn, columns } of blocks) {
		for (let row = 0; row < rows; row++) {
			const at = (localRow + row) * part.width + localColumn;
			const there = (fullRow + row) * width + fullColumn;
			for (let column = 0; column < columns; column++) {
				const [own, wanted] = [values[at + column]!, expected[there + column]!];
				squares += (own - wanted) ** 2;
				if (!Object.is(own, wanted)) different++;
				elements++;
			}
		}
	}
	return { squares, different, elements };
}

/** This rank's flips, counted over all ranks; the first of every rank that has one. */
function findFlips(engine: Engine, plan: Plan, subject: Subject, reference: StoredReference): LayoutResult["flips"] {
	const { topology } = plan;
	const { topk } = subject.language.moe;
	const rank = engine.world.ranks[engine.world.rank]!;
	const own = topology.language.contains(rank)
		? reference
				.routing()
				.flips(
					engine.routing,
					topology.language.coordinates(rank).dp * plan.microbatches * plan.microBatchSize * subject.sequenceLength,
				)
		: [];
	const message = new Int32Array(3 + 2 * topk);
	const [first] = own;
	if (first) message.set([own.length, first.layer, first.token, ...first.experts, ...first.reference]);
	const all = engine.world.exchange(message).filter(([count]) => count! > 0);
	return {
		count: all.reduce((sum, [count]) => sum + count!, 0),
		first: all.map((found) => ({
			layer: found[1]!,
			token: found[2]!,
			experts: [...found.subarray(3, 3 + topk)],
			reference: [...found.subarray(3 + topk)],
		})),
	};
}

/** This rank's tensors bit by bit. */
function bitsOf(engine: Engine, what: "value" | "gradient"): Uint32Array[] {
	const bits: Uint32Array[] = [];
	for (const tensor of engine.tensors()) {
		const part = tensor[what];
		if (part) bits.push(new Uint32Array(part.toFloat32().buffer));
		tensor.value[Symbol.dispose]();
		tensor.gradient?.[Symbol.dispose]();
	}
	return bits;
}

/** Elements that differ, over all ranks. */
function countUnequal(engine: Engine, a: readonly Uint32Array[], b: readonly Uint32Array[]): number {
	let count = 0;
	a.forEach((values, at) => {
		const other = b[at]!;
		for (let i = 0; i < values.length; i++) if (values[i] !== other[i]) count++;
	});
	const sum = Float64Array.of(count);
	reduceHost(engine.world, engine.state.scalars.device, sum, "sum");
	return sum[0]!;
}
