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
	/** Table of positions → patches. */
	readonly positions: SparseMatrix;
	/** Patches → stream. */
	readonly patches: SparseMatrix;
	/** Class tokens → stream. */
	readonly classTokens: SparseMatrix;
}

/** A microbatch's images in the tower's rows, and the sparse matrices that move rows to their places. */
export class PackedImages implements Disposable {
	/** Images with their class tokens. */
	readonly sequences: Sequences;
	/** null: the stage before makes the stream. */
	readonly embedding: PackedEmbedding | null;
	/** Stream → patches of the output in order, four a row with pixel shuffle; null: all of the stream, or the next stage's. */
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
		const stream = streamMatrices(config.classTokens, patches, all);
		const positions = { ...config.positions, width: hiddenSize };
		this.embedding = embeds
			? {
					positions: new SparseMatrix(device, positionMatrix(positionTable, grids, positions, crops)),
					patches: new SparseMatrix(device, stream.patches),
					classTokens: new SparseMatrix(device, stream.classTokens),
				}
			: null;
		this.rotary =
			config.rotaryBase === null ? null : placesOf(device, { ...config, rotaryBase: config.rotaryBase }, grids);
		const dropped = config.dropClassTokens && config.classTokens > 0;
		const make = () => pickRows(outputOrder(config, grids), tokens);
		this.output =
			hasHead && (config.pixelShuffle || dropped)
				? new SparseMatrix(device, { rows: all, columns: tokens, entries: all, weighted: false, make })
				: null;
	}

	get rows(): number {
		return this.rowsPerImage.reduce((sum, rows) => sum + rows, 0);
	}

	[Symbol.dispose](): void {
		const { tokens, axes } = this.rotary ?? { tokens: null, axes: [] };
		const places = [tokens, ...axes.flatMap(({ positions, frequencies }) => [positions, frequencies])];
		for (const owned of [this.sequences, ...Object.values(this.embedding ?? {}), this.output, ...places])
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
): PatchPlaces {
	const pairs = headDim / 2;
	const placed = grids.flatMap(({ rows, columns }) => [
		...Array.from({ length: classTokens }, () => [0, 0] as const),
		...Array.from({ length: rows * columns }, (_, at) => [Math.floor(at / columns), at % columns] as const),
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

/** The patch, and the class token, of every row of the stream. `all`: patches of all images. */
function streamMatrices(
	classTokens: number,
	patches: readonly number[],
	all: number,
): { readonly patches: SparseOutline; readonly classTokens: SparseOutline } {
	const classes = classTokens * patches.length;
	const rows = all + classes;
	const ofPatches = () => {
		const picked = new Int32Array(rows).fill(-1);
		let [row, patch] = [0, 0];
		for (const count of patches) {
			row += classTokens;
			for (let i = 0; i < count; i++) picked[row++] = patch++;
		}
		return pickRows(picked, all);
	};
	const ofClassTokens = () => {
		const picked = new Int32Array(rows).fill(-1);
		let row = 0;
		for (const count of patches) {
			for (let token = 0; token < classTokens; token++) picked[row++] = token;
			row += count;
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
function outputOrder({ classTokens, pixelShuffle }: VitConfig, grids: readonly PatchGrid[]): number[] {
	const order: number[] = [];
	let start = 0;
	for (const { rows, columns } of grids) {
		start += classTokens;
		const step = pixelShuffle ? 2 : 1;
		for (let i = 0; i < rows; i += step) {
			for (let j = 0; j < columns; j += step) {
				for (let q = 0; q < step * step; q++) order.push(start + (i + (q >> 1)) * columns + j + (q & 1));
			}
		}
		start += rows * columns;
	}
	return order;
}
