/** batches.safetensors of a vision-language model's reference: tokens, and pictures in the order of their placeholders. */
import { join } from "node:path";
import { openSafetensors, type SafetensorsFile } from "../../checkpoint/index.ts";
import { type ImageSet, joinImages, noImages, patchify } from "../../data/images.ts";
import { type ImageTextMicrobatch, mediaPositions } from "../../data/microbatch.ts";
import { joined } from "../../data/vision-language/batch.ts";
import { type ImageSizing, patchGrids, planImages } from "../../data/vision-language/image-plan.ts";
import type { PatchGrid, Tower } from "../../models/tower.ts";
import { rowsByItem } from "../../models/vision/pictures.ts";
import { patchWidth, type VitConfig } from "../../models/vit/config.ts";
import { visionModule } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";

interface Sizes {
	readonly steps: number;
	/** Samples of a step, and tokens of a sample. */
	readonly batch: number;
	readonly seq: number;
	readonly placeholder: number;
	readonly tower: Tower;
	readonly config: VitConfig;
	/** Whether tokens have positions on three axes. */
	readonly mrope: boolean;
	/** Sizes of images whose rows are arranged as pictures; null: they stand as they come. */
	readonly sizing: ImageSizing | null;
}

/** The samples of every step, of one sequence each. Throws a UserError for a tensor of another shape. */
export function readPictureBatches(folder: string, sizes: Sizes): ImageTextMicrobatch[][] {
	using file = openSafetensors(join(folder, "batches.safetensors"));
	return Array.from({ length: sizes.steps }, (_, step) => readStep(file, step + 1, sizes));
}

/** Rows of a picture in the text. */
function rowsOf({ grids }: ImageSet, { tower, sizing }: Pick<Sizes, "tower" | "sizing">): number {
	const rows = (grid: PatchGrid) => tower.rowsOf(grid);
	const counts = sizing === null ? grids.map(rows) : rowsByItem(grids, rows);
	return counts.reduce((sum, count) => sum + count, 0);
}

function readStep(file: SafetensorsFile, step: number, sizes: Sizes) {
	const { batch, seq, placeholder, config, mrope } = sizes;
	const tokens = (name: string) => {
		const { dtype, shape } = file.information(`${step}.${name}`);
		if (dtype === "I32" && String(shape) === String([batch, seq])) return file.read(`${step}.${name}`) as Int32Array;
		throw new UserError(
			`${step}.${name} in ${file.path} is ${dtype} [${shape}]; golden.json needs I32 [${[batch, seq]}].`,
		);
	};
	const [ids, labels] = [tokens("input_ids"), tokens("labels")];
	const pictures = readPictures(file, step, config, sizes.sizing);
	let picture = 0;
	return Array.from({ length: batch }, (_, sample): ImageTextMicrobatch => {
		const part = (values: Int32Array) => values.slice(sample * seq, (sample + 1) * seq);
		const text = part(ids);
		let left = text.reduce((sum, id) => sum + Number(id === placeholder), 0);
		const first = picture;
		while (left > 0 && picture < pictures.length) left -= rowsOf(pictures[picture++]!, sizes);
		const own = pictures.slice(first, picture);
		const all = own.length === 0 ? noImages(1) : joinImages(own);
		const images: ImageSet = { ...all, imagesPerSample: [all.grids.length] };
		const targets = part(labels);
		const lossMask = Float32Array.from(targets, (id) => Number(id >= 0));
		const plain = { ids: text, labels: targets, lossMask, lengths: [seq] };
		const merge = config.pixelShuffle ? 2 : 1;
		const positions = mrope ? mediaPositions(plain, images.grids, { placeholder, merge }) : null;
		return {
			text: { ...plain, ...(positions && { positions }) },
			features: { [visionModule]: images },
		};
	});
}

/** Every picture of a step by itself. */
export function readPictures(
	file: SafetensorsFile,
	step: number,
	config: VitConfig,
	sizing: ImageSizing | null = null,
): ImageSet[] {
	const name = `${step}.pixel_values`;
	const values = file.read(name) as Float32Array;
	const { patchSize } = config;
	if (file.tensors.has(`${step}.image_grid_thw`)) return readMerged(file, step, values, patchWidth(config));
	if (file.tensors.has(`${step}.image_grid_hw`)) return readRows(file, step, values, patchWidth(config));
	if (file.tensors.has(`${step}.spatial_shapes`)) return readPadded(file, step, values);
	if (sizing !== null) return readTiles(file, step, values, { config, sizing });
	const [count, , height, width] = file.information(name).shape as [number, number, number, number];
	const grid: PatchGrid = { rows: Math.floor(height / patchSize), columns: Math.floor(width / patchSize) };
	return Array.from({ length: count }, (_, picture) => {
		const pixels = values.subarray(picture * 3 * height * width, (picture + 1) * 3 * height * width);
		return { patches: wholePatches(pixels, { height, width, grid, patchSize }), grids: [grid], imagesPerSample: [1] };
	});
}

/** Patches of a picture's planes; pixels behind the last whole ones, to the right and below, are left out. */
function wholePatches(
	pixels: Float32Array,
	size: { readonly height: number; readonly width: number; readonly grid: PatchGrid; readonly patchSize: number },
): Float32Array {
	const { height, width, grid, patchSize } = size;
	const [whole, wide] = [grid.rows * patchSize, grid.columns * patchSize];
	const kept = Float32Array.from({ length: 3 * whole * wide }, (_, pixel) => {
		const [row, column] = [Math.floor(pixel / wide), pixel % wide];
		return pixels[(Math.floor(row / whole) * height + (row % whole)) * width + column]!;
	});
	return patchify(kept, whole, wide, patchSize);
}

/** Tiles of LLaVA-OneVision, padded to a common number, with the sizes of pictures and how many each sample has. */
function readTiles(
	file: SafetensorsFile,
	step: number,
	values: Float32Array,
	{ config, sizing }: { readonly config: VitConfig; readonly sizing: ImageSizing },
): ImageSet[] {
	const { patchSize } = config;
	const [, most, , height, width] = file.information(`${step}.pixel_values`).shape as [
		number,
		number,
		3,
		number,
		number,
	];
	const sizes = file.read(`${step}.image_sizes`) as Int32Array;
	let first = 0;
	return [...(file.read(`${step}.batch_num_images`) as Int32Array)].flatMap((count) => {
		const own = Array.from({ length: count }, (_, at) => {
			const [high, wide] = sizes.subarray(2 * (first + at)) as unknown as [number, number];
			return { height: high, width: wide };
		});
		first += count;
		return planImages(own, Number.POSITIVE_INFINITY, sizing, config).map((plan, at): ImageSet => {
			const grids = patchGrids(plan, patchSize);
			const patches = grids.map((grid, tile) => {
				const begin = ((first - count + at) * most + tile) * 3 * height * width;
				return wholePatches(values.subarray(begin), { height, width, grid, patchSize });
			});
			return { patches: joined(patches), grids, imagesPerSample: [grids.length] };
		});
	});
}

/** SigLIP 2's rows of patches, channels last, padded to a common number. */
function readPadded(file: SafetensorsFile, step: number, values: Float32Array): ImageSet[] {
	const [, most, width] = file.information(`${step}.pixel_values`).shape as [number, number, number];
	const sides = file.read(`${step}.spatial_shapes`) as Int32Array;
	const pixels = width / 3;
	return Array.from({ length: sides.length / 2 }, (_, picture) => {
		const [rows, columns] = sides.subarray(2 * picture) as unknown as [number, number];
		const patches = Float32Array.from({ length: rows * columns * width }, (_, at) => {
			const [row, channel, pixel] = [Math.floor(at / width), Math.floor((at % width) / pixels), at % pixels];
			return values[(picture * most + row) * width + pixel * 3 + channel]!;
		});
		return { patches, grids: [{ rows, columns }], imagesPerSample: [1] };
	});
}

/** Patches row by row, as Nemotron's processor has them. */
function readRows(file: SafetensorsFile, step: number, values: Float32Array, width: number): ImageSet[] {
	const sizes = file.read(`${step}.image_grid_hw`) as Int32Array;
	let first = 0;
	return Array.from({ length: sizes.length / 2 }, (_, picture) => {
		const [rows, columns] = sizes.subarray(2 * picture) as unknown as [number, number];
		const patches = values.slice(first, first + rows * columns * width);
		first += patches.length;
		return { patches, grids: [{ rows, columns }], imagesPerSample: [1] };
	});
}

/** Patches in Qwen's order: blocks of 2 × 2 row by row, those of a block row by row. */
function readMerged(file: SafetensorsFile, step: number, values: Float32Array, width: number): ImageSet[] {
	const sizes = file.read(`${step}.image_grid_thw`) as Int32Array;
	let row = 0;
	return Array.from({ length: sizes.length / 3 }, (_, picture) => {
		const [, rows, columns] = sizes.subarray(3 * picture) as unknown as [number, number, number];
		const patches = new Float32Array(rows * columns * width);
		for (const place of mergedOrder({ rows, columns })) {
			patches.set(values.subarray(row * width, (row + 1) * width), place * width);
			row++;
		}
		return { patches, grids: [{ rows, columns }], imagesPerSample: [1] };
	});
}

/** Places row by row of the patches in Qwen's order. */
export function mergedOrder({ rows, columns }: PatchGrid): number[] {
	return Array.from({ length: rows * columns }, (_, at) => {
		const block = Math.floor(at / 4);
		const [down, along] = [2 * Math.floor(block / (columns / 2)), 2 * (block % (columns / 2))];
		return (down + ((at >> 1) & 1)) * columns + along + (at & 1);
	});
}
