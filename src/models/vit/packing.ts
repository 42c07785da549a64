/**
 * How the images of a microbatch lie in one stream (docs/spec/vision.md §2): [class tokens, patches] image after image,
 * attention within each, and which rows of the last layer become output rows. Fixed resolution is the case of equal
 * images.
 */
import type { Device } from "../../native/device.ts";
import { UserError } from "../../system/errors.ts";
import { pickRows, Sequences, SparseMatrix, type SparseOutline, Tensor } from "../../tensor/index.ts";
import type { PipelineSegment } from "../language/pipeline-segments.ts";
import type { PatchGrid } from "../tower.ts";
import { outputRows, type VitConfig } from "./config.ts";
import { type PositionCrop, positionMatrix } from "./positions.ts";

/** The matrices that make the stream. */
export interface PackedEmbedding {
	/** Table of positions → patches; null: there is no table. */
	readonly positions: SparseMatrix | null;
	/** Patches → stream. */
	readonly patches: SparseMatrix;
	/** Class tokens → stream. */
	readonly classTokens: SparseMatrix;
}

/** A microbatch's images in the tower's rows, and the sparse matrices that move rows to their places. */
export class PackedImages implements Disposable {
	/** Images with their class tokens. */
	readonly sequences: Sequences;
	/** Windows of the images; null: layers attend over whole images. */
	readonly windows: Sequences | null;
	/** null: the stage before makes the stream. */
	readonly embedding: PackedEmbedding | null;
	/** Stream → patches of the output in order, four a row with pixel shuffle; null: all of the stream, or no row is read here. */
	readonly output: SparseMatrix | null;
	/** null: patches do not turn by their places. */
	readonly rotary: PatchPlaces | null;
	/** Rows the tower gives for every image. */
	readonly rowsPerImage: readonly number[];

	/** `crops`: the windows of the table images are trained on; null: the whole table. */
	constructor(
		device: Device,
		config: VitConfig,
		readonly grids: readonly PatchGrid[],
		crops: readonly PositionCrop[] | null,
		{ embeds, hasHead }: Pick<PipelineSegment, "embeds" | "hasHead">,
	) {
		for (const [image, grid] of grids.entries()) checkGrid(config, grid, image);
		const patches = grids.map(({ rows, columns }) => rows * columns);
		this.sequences = Sequences.of(
			device,
			patches.map((count) => config.classTokens + count),
		);
		this.rowsPerImage = grids.map((grid) => outputRows(config, grid));
		const { positionTable, hiddenSize } = config;
		const all = patches.reduce((sum, count) => sum + count, 0);
		const { tokens } = this.sequences;
		const orders = grids.map((grid) => streamOrder(config, grid));
		const stream = streamMatrices(config.classTokens, orders, all);
		this.windows =
			config.windows &&
			Sequences.of(
				device,
				orders.flatMap(({ lengths }) => lengths),
			);
		const positions = { ...config.positions, width: hiddenSize };
		this.embedding = embeds
			? {
					positions:
						config.positions.mode === "none"
							? null
							: new SparseMatrix(device, positionMatrix(positionTable, grids, positions, crops)),
					patches: new SparseMatrix(device, stream.patches),
					classTokens: new SparseMatrix(device, stream.classTokens),
				}
			: null;
		this.rotary =
			config.rotaryBase === null ? null : placesOf(device, { ...config, rotaryBase: config.rotaryBase }, grids, orders);
		const dropped = config.dropClassTokens && config.classTokens > 0;
		const make = () => pickRows(outputOrder(config, grids, orders), tokens);
		this.output =
			(hasHead || config.taps.length > 0) && (config.pixelShuffle || dropped)
				? new SparseMatrix(device, { rows: all, columns: tokens, entries: all, weighted: false, make })
				: null;
	}

	get rows(): number {
		return this.rowsPerImage.reduce((sum, rows) => sum + rows, 0);
	}

	[Symbol.dispose](): void {
		const { tokens, axes } = this.rotary ?? { tokens: null, axes: [] };
		const places = [tokens, ...axes.flatMap(({ positions, frequencies }) => [positions, frequencies])];
		for (const owned of [this.sequences, this.windows, ...Object.values(this.embedding ?? {}), this.output, ...places])
			owned?.[Symbol.dispose]();
	}
}

/** The row and the column of every patch, with the frequencies of the pairs that turn by it, f64, and zeros for others. */
export interface PatchPlaces {
	/** Every row of the stream by itself. */
	readonly tokens: Sequences;
	readonly axes: readonly { readonly positions: Tensor; readonly frequencies: Tensor }[];
}

/** A half of a head's pairs turns by the row, the other by the column (docs/spec/vision.md §1.11); class tokens do not turn. */
function placesOf(
	device: Device,
	{ headDim, rotaryBase, classTokens }: Pick<VitConfig, "headDim" | "classTokens"> & { readonly rotaryBase: number },
	grids: readonly PatchGrid[],
	orders: readonly StreamOrder[],
): PatchPlaces {
	const pairs = headDim / 2;
	const placed = grids.flatMap(({ columns }, image) => [
		...Array.from({ length: classTokens }, () => [0, 0] as const),
		...orders[image]!.patches.map((at) => [Math.floor(at / columns), at % columns] as const),
	]);
	const axes = [0, 1].map((axis) => {
		const own = (pair: number) => Math.floor((2 * pair) / pairs) === axis;
		const frequency = (pair: number) => rotaryBase ** ((-2 * (pair % (pairs / 2))) / pairs);
		const frequencies = Float64Array.from({ length: pairs }, (_, pair) => (own(pair) ? frequency(pair) : 0));
		const positions = Int32Array.from(placed, (place) => place[axis]!);
		return { positions: Tensor.from(device, positions), frequencies: Tensor.from(device, frequencies) };
	});
	return { tokens: Sequences.batch(device, placed.length, 1), axes };
}

function checkGrid(config: VitConfig, { rows, columns }: PatchGrid, image: number): void {
	const whole = Number.isInteger(rows) && Number.isInteger(columns) && rows > 0 && columns > 0;
	if (!whole) throw new UserError(`Image ${image} has ${rows} × ${columns} patches; both must be whole and positive.`);
	if (config.pixelShuffle && (rows % 2 === 1 || columns % 2 === 1)) {
		throw new UserError(
			`Image ${image} has ${rows} × ${columns} patches; pixel shuffle needs an even number of both rows and columns.`,
		);
	}
}

/** How an image's patches follow each other in the stream. */
interface StreamOrder {
	/** Numbers of the patches, row by row in the image. */
	readonly patches: readonly number[];
	/** Patches of each run of the stream that attends by itself in a layer of windows. */
	readonly lengths: readonly number[];
}

/** Row by row; with windows one after the other, and in a window by blocks of patches that become a row (docs/spec/vision.md §1.12). */
function streamOrder({ windows, pixelShuffle }: VitConfig, { rows, columns }: PatchGrid): StreamOrder {
	const count = rows * columns;
	if (windows === null) return { patches: Array.from({ length: count }, (_, at) => at), lengths: [count] };
	const block = pixelShuffle ? 2 : 1;
	const patches: number[] = [];
	const lengths: number[] = [];
	for (let top = 0; top < rows; top += windows.side) {
		for (let left = 0; left < columns; left += windows.side) {
			const before = patches.length;
			for (let i = top; i < Math.min(rows, top + windows.side); i += block) {
				for (let j = left; j < Math.min(columns, left + windows.side); j += block) {
					for (let q = 0; q < block * block; q++) patches.push((i + (q >> 1)) * columns + j + (q & 1));
				}
			}
			lengths.push(patches.length - before);
		}
	}
	return { patches, lengths };
}

/** The patch, and the class token, of every row of the stream. `all`: patches of all images. */
function streamMatrices(
	classTokens: number,
	orders: readonly StreamOrder[],
	all: number,
): { readonly patches: SparseOutline; readonly classTokens: SparseOutline } {
	const classes = classTokens * orders.length;
	const rows = all + classes;
	const ofPatches = () => {
		const picked = new Int32Array(rows).fill(-1);
		let [row, first] = [0, 0];
		for (const { patches } of orders) {
			row += classTokens;
			for (const patch of patches) picked[row++] = first + patch;
			first += patches.length;
		}
		return pickRows(picked, all);
	};
	const ofClassTokens = () => {
		const picked = new Int32Array(rows).fill(-1);
		let row = 0;
		for (const { patches } of orders) {
			for (let token = 0; token < classTokens; token++) picked[row++] = token;
			row += patches.length;
		}
		return pickRows(picked, classTokens);
	};
	return {
		patches: { rows, columns: all, entries: all, weighted: false, make: ofPatches },
		classTokens: { rows, columns: classTokens, entries: classes, weighted: false, make: ofClassTokens },
	};
}

/**
 * Rows of the stream in output order (docs/spec/vision.md §2.4): row-major over 2 × 2 blocks, within one TL, TR, BL,
 * BR.
 */
function outputOrder(
	{ classTokens, pixelShuffle }: VitConfig,
	grids: readonly PatchGrid[],
	orders: readonly StreamOrder[],
): number[] {
	const order: number[] = [];
	let start = 0;
	for (const [image, { rows, columns }] of grids.entries()) {
		const place = new Int32Array(rows * columns);
		for (const [at, patch] of orders[image]!.patches.entries()) place[patch] = at;
		start += classTokens;
		const step = pixelShuffle ? 2 : 1;
		for (let i = 0; i < rows; i += step) {
			for (let j = 0; j < columns; j += step) {
				for (let q = 0; q < step * step; q++) order.push(start + place[(i + (q >> 1)) * columns + j + (q & 1)]!);
			}
		}
		start += rows * columns;
	}
	return order;
}
