/**
 * Encoder lanes share the images of a microbatch by what they cost (docs/spec/runtime.md §2.4): patches go from the lane
 * that has read an image to the lane that encodes it, its rows come back, and their gradient goes the same way. So the
 * edge to the language model, the order of samples and the data are those of lanes that encode what they read.
 */
import type { ImageSet, PlacedImages } from "../data/images.ts";
import { outputRows, type PatchGrid, patchWidth, type RadioConfig } from "../models/radio/config.ts";
import { imageCost } from "../models/radio/counts.ts";
import type { EncoderModule } from "../models/vision/encoder.ts";
import { dealStep, type LanesMeet } from "../parallel/balance-by-cost.ts";
import { consecutive, type Group, type RowRanges } from "../parallel/group.ts";
import type { Topology } from "../parallel/topology.ts";
import type { Tape } from "../tensor/tape.ts";
import { cast, copyInto, type FloatDtype, Tensor } from "../tensor/tensor.ts";

/** An image as all lanes know it. */
interface PlacedImage {
	readonly grid: PatchGrid;
	/** Place among the images of the step's global batch. */
	readonly index: number;
}

/** The encoder's data-parallel ranks. */
export interface EncoderLanes {
	readonly group: Group;
	/** Moments at which the language lanes behind them wait for each other. */
	readonly meet: LanesMeet;
}

/** The lanes of a group of data-parallel encoder ranks that share images; null: there is one lane. */
export function sharingLanes(group: Group, { language: { lanes, shape } }: Topology): EncoderLanes | null {
	if (group.size === 1) return null;
	// Lanes that share experts exchange rows in every microbatch, and one lane alone takes rows of all.
	const together = shape.expert * shape.expertTensor > shape.tensor || lanes === 1;
	return { group, meet: together ? "every microbatch" : "every step" };
}

/** Integers of an image in an exchange. */
const width = 3;

/**
 * The deals of a step's microbatches; null: every lane encodes what it has read. All ranks of the group call this together
 * with equally many microbatches.
 */
export function dealImages(
	encoder: EncoderModule,
	{ group, meet }: EncoderLanes,
	microbatches: readonly PlacedImages[],
): (ImageDeal | null)[] {
	const { config, options } = encoder;
	const read = readByAll(group, microbatches);
	const costs = read.map((lanes) =>
		lanes.map((own) => own.map(({ grid }) => imageCost(config, grid, options.frozenTower))),
	);
	return dealStep(costs, meet).map((to, index) => {
		const moves = to.some((own, home) => own.some((lane) => lane !== home));
		return moves ? new ImageDeal(group, config.tower, read[index]!, to) : null;
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

export class ImageDeal {
	/** Images that this lane encodes, in the order of the lanes that have read them. */
	readonly grids: readonly PatchGrid[];
	readonly indices: readonly number[];
	/** Images that this lane has read, by the lane that encodes them. */
	readonly #byLane: readonly number[];
	/** Rows that the images this lane has read become, image after image. */
	readonly #ownRows: readonly number[];
	/** Patches leave, and come to be encoded; rows come back, and leave. */
	readonly #patches: { readonly read: RowRanges; readonly encoded: RowRanges };
	readonly #rows: { readonly read: RowRanges; readonly encoded: RowRanges };

	/** `read`: images by the lane that has read them; `to`: the lane that encodes each. */
	constructor(
		private readonly lanes: Group,
		tower: RadioConfig,
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
		const rowsOf = ({ grid }: PlacedImage) => outputRows(tower, grid);
		this.#ownRows = own.map(rowsOf);
		const patchesOf = ({ grid }: PlacedImage) => grid.rows * grid.columns;
		this.#patches = { read: rangesOf(leaving, patchesOf), encoded: rangesOf(dealt, patchesOf) };
		this.#rows = { read: rangesOf(leaving, rowsOf), encoded: rangesOf(dealt, rowsOf) };
	}

	/** Patches of the images that this lane encodes, out of those that it has read. The receiver disposes them. */
	exchangePatches({ device, config: { tower } }: EncoderModule, { patches, grids }: ImageSet): Tensor {
		const values = patchWidth(tower);
		const counts = grids.map(({ rows, columns }) => rows * columns);
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
	 * Rows_RH of the images that this lane has read, in their order, out of those that it has encoded; the caller disposes
	 * both. The way back is gone on every lane, whether it has a gradient or not.
	 */
	bringHome(tape: Tape, rows: Tensor): Tensor {
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

	/** Rows of this lane's images in the order in which it has read them, or by the lane that encodes them; a new owner. */
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

/** Rows of each lane's images, lane after lane. */
function rangesOf(lanes: readonly (readonly PlacedImage[])[], sizeOf: (image: PlacedImage) => number): RowRanges {
	return consecutive(lanes.map((images) => sum(images.map(sizeOf))));
}

function sum(values: readonly number[]): number {
	return values.reduce((total, value) => total + value, 0);
}
