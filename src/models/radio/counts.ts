/**
 * Operations of an image in the RADIO tower (docs/spec/vision.md §1.5), and of any encoder's item in tower and projector: forward
 * pass, a multiply-add counts 2.
 */
import type { PatchGrid, TowerWork } from "../tower.ts";
import type { EncoderParts } from "../vision/encoder.ts";
import { patchWidth, type RadioConfig } from "./config.ts";

/** Attention grows with the square of the patches, products with their number. */
export function radioWork(config: RadioConfig, grid: PatchGrid): TowerWork {
	const { hiddenSize: c, heads, headDim, ffnHiddenSize: f, layers } = config;
	const patches = grid.rows * grid.columns;
	const tokens = patches + config.classTokens;
	const attended = heads * headDim;
	return {
		attention: layers * 4 * tokens * tokens * attended,
		products: 2 * patches * patchWidth(config) * c + layers * 2 * tokens * (4 * c * attended + 2 * c * f),
	};
}

function projectorWork({ tower, projector }: EncoderParts, grid: PatchGrid): number {
	const { inputSize, outputSize, ffnHiddenSize } = projector;
	const projected = projector.type === "affine" ? inputSize * outputSize : ffnHiddenSize * (inputSize + outputSize);
	return 2 * tower.rowsOf(grid) * projected;
}

export function encoderFlops(parts: EncoderParts, grid: PatchGrid): number {
	const { attention, products } = parts.tower.workOf(grid);
	return attention + products + projectorWork(parts, grid);
}

/** Forward and backward over forward: products once more for inputs and once for weights; attention computes its scores anew. */
const [trainedProducts, trainedAttention] = [3, 3.5];

/**
 * Cost of training on an item, in operations that run: a·S² + b·S with the S patches of an image. A frozen tower runs forward
 * alone.
 */
export function imageCost(parts: EncoderParts, grid: PatchGrid, frozenTower: boolean): number {
	const { attention, products } = parts.tower.workOf(grid);
	const tower = frozenTower ? attention + products : trainedAttention * attention + trainedProducts * products;
	return tower + trainedProducts * projectorWork(parts, grid);
}
