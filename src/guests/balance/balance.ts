/**
 * `--encoder-balance cost`: encoder lanes share the images of a microbatch by cost (docs/spec/runtime.md §2.4). Patches are sent from
 * the lane that has read an image to the lane that encodes it, the encoded rows are sent back, and the rows' gradient takes the
 * reverse path. The edge to the language model, the order of samples and the data sets are not affected.
 */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { type ImageSet, type PlacedImages, patchesOfTower, patchTensor } from "../../data/images.ts";
import type { PatchGrid, Tower } from "../../models/tower.ts";
import type { EncoderModule } from "../../models/vision/encoder.ts";
import { imageCost } from "../../models/vit/tower.ts";
import { consecutive, type Group, type RowRanges, type Topology, visionModule } from "../../parallel/index.ts";
import { cast, copyInto, type FloatDtype, type Tape, Tensor } from "../../tensor/index.ts";
import type { EncodeImages, Guest } from "../guest.ts";
import { type FittedCost, fittedCost, MeasuredTimes } from "./fitted-cost.ts";

/** Under this name a training keeps the fitted cost. */
const keptName = "encoder-cost";

/**
 * --encoder-balance; with `number` each lane encodes the images that it has read. `room`: patches of a microbatch that memory is planned
 * for; a lane takes as many, or as many as another has read.
 */
export function balanceOf(
	{
		encoderBalance,
		encoderCostSteps,
	}: Pick<TrainingConfiguration, "encoderBalance"> & Partial<Pick<TrainingConfiguration, "encoderCostSteps">>,
	room = 0,
): Guest | null {
	if (encoderBalance !== "cost") return null;
	return {
		open: ({ encoders, topology }) => {
			const encoder = encoders.find(({ name }) => name === visionModule);
			// All stages of an encoder work on the images of their lane.
			if (!encoder || encoder.groups.stages.size > 1) return null;
			const lanes = sharingLanes(encoder.groups.replicas.dense, topology);
			if (!lanes) return null;
			const { module } = encoder;
			const times = new MeasuredTimes();
			let fit: FittedCost | null = null;
			const cost = (grid: PatchGrid) =>
				fit === null ? imageCost(module.config, grid, module.options.frozenTower) : fittedCost(fit, grid);
			return {
				keep: () => (fit === null ? {} : { [keptName]: fit }),
				restore: (kept) => {
					fit = kept[keptName] ?? null;
				},
				beforeStep: ({ features, iteration, training }) => {
					const steps = encoderCostSteps ?? 0;
					// A first step is longer than others: kernels are chosen in it.
					const measures = training && fit === null && iteration > 0 && iteration <= steps;
					if (training && fit === null && steps > 0 && iteration === steps + 1) {
						fit = times.fit(lanes.group, encoder.groups.model.tp);
					}
					const measured: Measured = measures ? (grids, run) => timed(module, times, grids, run) : (_, run) => run();
					const deals = balanceImages(module, lanes, features.get(encoder.name)!, { cost, room }).map((deal) =>
						deal === null ? (measures ? asReadOf(module, measured) : null) : dealt(module, deal, measured),
					);
					return { encode: (encoder, microbatch) => (encoder === module ? deals[microbatch]! : null) };
				},
			};
		},
	};
}

/** Runs the encoder on images, and may note how long it took. */
type Measured = (grids: readonly PatchGrid[], run: () => Tensor) => Tensor;

/** Adds the milliseconds of a run to `times`; waits for the device. */
function timed(
	{ device }: EncoderModule,
	times: MeasuredTimes,
	grids: readonly PatchGrid[],
	run: () => Tensor,
): Tensor {
	if (grids.length === 0) return run();
	device.synchronize();
	const started = performance.now();
	const rows = run();
	device.synchronize();
	times.add(grids, performance.now() - started);
	return rows;
}

/** Encodes the images that this lane was assigned. */
function dealt(encoder: EncoderModule, deal: EncoderBalance, measured: Measured): EncodeImages {
	return (tape, images, { cropKey, observe }) => {
		using patches = deal.exchangePatches(encoder, images);
		const { grids, indices } = deal;
		using encoded = measured(grids, () => encoder.forward(tape, { patches, grids, indices, cropKey }, observe));
		return deal.returnRows(tape, encoded);
	};
}

/** Encodes the images that this lane has read. */
function asReadOf(encoder: EncoderModule, measured: Measured): EncodeImages {
	return (tape, images, { cropKey, observe }) => {
		const { grids, indices } = images;
		using patches = patchTensor(encoder.device, encoder.config.tower, images);
		return measured(grids, () => encoder.forward(tape, { patches, grids, indices, cropKey }, observe));
	};
}

/** An image as all lanes know it. */
interface PlacedImage {
	readonly grid: PatchGrid;
	/** Place among the images of the step's global batch. */
	readonly index: number;
}

/** The encoder's data-parallel ranks. */
interface EncoderLanes {
	readonly group: Group;
	/** How often the language lanes that these lanes serve wait for each other. */
	readonly meet: LaneBarrier;
}

/** The encoder lanes that share images, one for each rank of the data-parallel group; null if there is only one. */
function sharingLanes(group: Group, { language: { lanes, shape } }: Topology): EncoderLanes | null {
	if (group.size === 1) return null;
	// Expert parallelism over lanes synchronises them in every microbatch, and so does a single language lane that all feed.
	const together = shape.expert * shape.expertTensor > shape.tensor || lanes === 1;
	return { group, meet: together ? "every microbatch" : "every step" };
}

/** Integers that describe an image in an exchange: rows, columns, index. */
const width = 3;

/**
 * The assignment of each of a step's microbatches; null: no image moves. Collective over the group, with equally many microbatches
 * on every rank.
 */
function balanceImages(
	encoder: EncoderModule,
	{ group, meet }: EncoderLanes,
	microbatches: readonly PlacedImages[],
	{ cost, room }: { readonly cost: (grid: PatchGrid) => number; readonly room: number },
): (EncoderBalance | null)[] {
	const { config } = encoder;
	const read = readByAll(group, microbatches);
	const costs = read.map((lanes) => lanes.map((own) => own.map(({ grid }) => cost(grid))));
	const patches = read.map((lanes) => lanes.map((own) => own.map(patchesOf)));
	return balanceStep(costs, meet, { patches, room }).map((to, index) => {
		const moves = to.some((own, home) => own.some((lane) => lane !== home));
		return moves ? new EncoderBalance(group, config.tower, read[index]!, to) : null;
	});
}

/** The images of every microbatch, by the lane that has read them. */
function readByAll(lanes: Group, microbatches: readonly PlacedImages[]): PlacedImage[][][] {
	const counts = lanes.exchange(Int32Array.from(microbatches, ({ grids }) => grids.length));
	const most = Math.max(...counts.map((own) => own.reduce((sum, count) => sum + count, 0)));
	const own = new Int32Array(most * width);
	const values = microbatches.flatMap(({ grids, indices }) =>
		grids.flatMap(({ rows, columns }, image) => [rows, columns, indices[image]!]),
	);
	own.set(values);
	const images = most > 0 ? lanes.exchange(own) : counts.map(() => own);
	const at = counts.map(() => 0);
	return microbatches.map((_, microbatch) =>
		images.map((all, lane) =>
			Array.from({ length: counts[lane]![microbatch]! }, (): PlacedImage => {
				const [rows, columns, index] = all.subarray(at[lane]!, at[lane]! + width);
				at[lane]! += width;
				return { grid: { rows: rows!, columns: columns! }, index: index! };
			}),
		),
	);
}

class EncoderBalance {
	/** Grids and global indices of the images that this lane encodes, in the order of the lanes that have read them. */
	readonly grids: readonly PatchGrid[];
	readonly indices: readonly number[];
	/** Indices of the images that this lane has read, ordered by the lane that encodes them. */
	readonly #byLane: readonly number[];
	/** Encoded rows of each image that this lane has read. */
	readonly #ownRows: readonly number[];
	/** Ranges by lane: of the images that this lane has read (sent as patches, received as rows), and of those that it encodes. */
	readonly #patches: { readonly read: RowRanges; readonly encoded: RowRanges };
	readonly #rows: { readonly read: RowRanges; readonly encoded: RowRanges };

	/** `read`: images by the lane that has read them; `to`: the lane that encodes each. */
	constructor(
		private readonly lanes: Group,
		tower: Tower,
		read: readonly (readonly PlacedImage[])[],
		to: readonly (readonly number[])[],
	) {
		const own = read[lanes.rank]!;
		const dealt = read.map((images, lane) => images.filter((_, image) => to[lane]![image] === lanes.rank));
		const leaving = read.map((_, lane) => own.filter((_, image) => to[lanes.rank]![image] === lane));
		const all = dealt.flat();
		this.grids = all.map(({ grid }) => grid);
		this.indices = all.map(({ index }) => index);
		const goesTo = to[lanes.rank]!;
		this.#byLane = [...own.keys()].sort((a, b) => goesTo[a]! - goesTo[b]! || a - b);
		const rowsOf = ({ grid }: PlacedImage) => tower.rowsOf(grid);
		this.#ownRows = own.map(rowsOf);
		this.#patches = { read: rangesOf(leaving, patchesOf), encoded: rangesOf(dealt, patchesOf) };
		this.#rows = { read: rangesOf(leaving, rowsOf), encoded: rangesOf(dealt, rowsOf) };
	}

	/** Sends the patches of the images that this lane has read, and returns those of the images that it encodes. The caller disposes them. */
	exchangePatches({ device, config: { tower } }: EncoderModule, images: ImageSet): Tensor {
		const values = tower.patchWidth;
		const patches = patchesOfTower(tower, images);
		const counts = images.grids.map(({ rows, columns }) => rows * columns);
		const { offsets: begins } = consecutive(counts);
		using wide = Tensor.empty(device, [sum(counts), values], "f32", "data");
		let at = 0;
		for (const image of this.#byLane) {
			using place = wide.rowsFrom(at, counts[image]!);
			const begin = begins[image]! * values;
			device.copyToDevice(place, patches.subarray(begin, begin + counts[image]! * values));
			at += counts[image]!;
		}
		using leaving = tower.dtype === "f32" ? wide.share() : cast(wide, tower.dtype, "data");
		const { read, encoded } = this.#patches;
		return this.#exchange(leaving, read, encoded, "data");
	}

	/**
	 * Sends `rows`, the rows_RH of the images that this lane has encoded, and returns those of the images that it has read, in their
	 * order; the caller disposes both. Backward is a collective, so it runs on every lane, with zeros where no gradient came.
	 */
	returnRows(tape: Tape, rows: Tensor): Tensor {
		const { read, encoded } = this.#rows;
		using arrived = this.#exchange(rows, encoded, read);
		const home = tape.output(this.#reordered(arrived, "as read"), tape.recording);
		const slot = home.gradient;
		if (slot === null) return home;
		const { shape } = home;
		const goBack = () => {
			using gradient = slot.take() ?? Tensor.zeros(tape.device, shape, rows.dtype);
			using leaving = this.#reordered(gradient, "by lane");
			const come = this.#exchange(leaving, read, encoded);
			if (rows.gradient === null) come[Symbol.dispose]();
			else rows.gradient.accumulate(come);
		};
		tape.onReturn("deal images", goBack, [{ [Symbol.dispose]: () => slot.clear() }]);
		return home;
	}

	#exchange(send: Tensor, from: RowRanges, to: RowRanges, tag: "data" | "activation" = "activation"): Tensor {
		const come = Tensor.empty(send.device, [sum(to.counts), send.width], send.dtype, tag);
		this.lanes.allToAll(send, from, come, to).wait();
		return come;
	}

	/** Rows of the images that this lane has read, reordered by reading order or by encoding lane; the caller owns the result. */
	#reordered(rows: Tensor, order: "as read" | "by lane"): Tensor {
		if (this.#byLane.every((image, place) => image === place)) return rows.share();
		const result = Tensor.empty(rows.device, rows.shape, rows.dtype as FloatDtype);
		const { offsets: begins } = consecutive(this.#ownRows);
		let at = 0;
		for (const image of this.#byLane) {
			const [count, read] = [this.#ownRows[image]!, begins[image]!];
			using from = rows.rowsFrom(order === "as read" ? at : read, count);
			using to = result.rowsFrom(order === "as read" ? read : at, count);
			copyInto(from, to);
			at += count;
		}
		return result;
	}
}

const patchesOf = ({ grid }: PlacedImage) => grid.rows * grid.columns;

/** Rows of each lane's images, lane after lane. */
function rangesOf(lanes: readonly (readonly PlacedImage[])[], sizeOf: (image: PlacedImage) => number): RowRanges {
	return consecutive(lanes.map((images) => sum(images.map(sizeOf))));
}

function sum(values: readonly number[]): number {
	return values.reduce((total, value) => total + value, 0);
}

// Balances the items that lanes have read over the lanes, so that the busiest lane has little more work than the others
// (docs/spec/runtime.md §2.4). Every lane computes the assignment from the same costs and gets the same result.

/** An assignment that moves fewer items is preferred if its busiest lane has at most this times the least work: moves cost time too. */
const slack = 1.01;

interface Item {
	readonly home: number;
	readonly place: number;
	readonly cost: number;
	readonly patches: number;
}

/** [lane that has read the item][item]: costs of a microbatch's items, or the lanes they are assigned to. */
export type ByLane = readonly (readonly number[])[];

/** How often lanes wait for each other even if no item moves. */
type LaneBarrier = "every microbatch" | "every step";

/**
 * The assignment of each of a step's microbatches. Moving items makes lanes wait for each other in every microbatch; if they would
 * otherwise wait once a step only, and moving shortens the step by nothing, no item moves.
 */
export function balanceStep(
	microbatches: readonly ByLane[],
	meet: LaneBarrier,
	{ patches, room }: { readonly patches: readonly ByLane[] | null; readonly room: number } = { patches: null, room: 0 },
): ByLane[] {
	const dealt = microbatches.map((costs, index) => balanceByCost(costs, patches?.[index], room));
	if (meet === "every microbatch") return dealt;
	const [apart, together] = [new Array<number>(microbatches[0]?.length ?? 0).fill(0), { most: 0 }];
	for (const [index, costs] of microbatches.entries()) {
		for (const [lane, own] of costs.entries()) for (const cost of own) apart[lane]! += cost;
		together.most += Math.max(...workOf(costs, dealt[index]!));
	}
	return together.most < Math.max(0, ...apart) ? dealt : microbatches.map(asRead);
}

/** Sum of the costs assigned to each lane. */
export function workOf(costs: ByLane, assigned: ByLane): number[] {
	const work = costs.map(() => 0);
	for (const [home, lanes] of assigned.entries()) {
		for (const [place, lane] of lanes.entries()) work[lane]! += costs[home]![place]!;
	}
	return work;
}

/** The assignment that moves no item. */
export function asRead(costs: ByLane): ByLane {
	return costs.map((own, home) => own.map(() => home));
}

/**
 * Assigns the items of one microbatch. `costs`: above 0. Items are assigned largest first to the lane with the least work (LPT: at
 * most 4/3 of the optimal maximum), but stay with the lane that has read them if the maximum is no larger. No lane gets more patches
 * than `room` and than the lane with most has read: `mimo plan` counts memory for those. Default: items have none.
 */
export function balanceByCost(costs: ByLane, patches: ByLane = costs.map((own) => own.map(() => 0)), room = 0): ByLane {
	const items = costs
		.flatMap((own, home) => own.map((cost, place): Item => ({ home, place, cost, patches: patches[home]![place]! })))
		.sort((a, b) => b.cost - a.cost || a.home - b.home || a.place - b.place);
	const mostPatches = Math.max(room, ...patches.map(sum));
	const unmoved = { lanes: asRead(costs), most: Math.max(...costs.map(sum)) };
	const anywhere = assignWithin(items, costs, 0, mostPatches) ?? unmoved;
	const mostlyAtHome = assignWithin(items, costs, anywhere.most, mostPatches) ?? unmoved;
	const least = Math.min(anywhere.most, unmoved.most, mostlyAtHome.most);
	return [unmoved, mostlyAtHome, anywhere].find(({ most }) => most <= slack * least)!.lanes;
}

/**
 * Largest item first: to the lane that has read it while that lane's work stays within `bound`, else to the lane with the least work,
 * of those that have room for its patches; null: no lane has.
 */
function assignWithin(items: readonly Item[], costs: ByLane, bound: number, mostPatches: number) {
	const loads = costs.map(() => 0);
	const held = costs.map(() => 0);
	const lanes = costs.map((own) => own.map(() => 0));
	for (const { home, place, cost, patches } of items) {
		const load = (lane: number) => (held[lane]! + patches <= mostPatches ? loads[lane]! : Number.POSITIVE_INFINITY);
		const lightest = loads.reduce((best, _, lane) => (load(lane) < load(best) ? lane : best), 0);
		const lane = load(home) + cost <= bound ? home : lightest;
		if (load(lane) === Number.POSITIVE_INFINITY) return null;
		loads[lane]! += cost;
		held[lane]! += patches;
		lanes[home]![place] = lane;
	}
	return { lanes, most: Math.max(...loads) };
}
