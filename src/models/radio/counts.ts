/**
 * Operations of an image in the RADIO tower and the projector (docs/spec/vision.md §1.5, §3): forward pass, a
 * multiply-add counts 2.
 */
import type { ProjectorConfig } from "../vision/projector.ts";
import { outputRows, type PatchGrid, patchWidth, type RadioConfig } from "./config.ts";

interface Modules {
	readonly tower: RadioConfig;
	readonly projector: ProjectorConfig;
}

interface EncoderWork {
	/** Of queries with keys and of scores with values in the tower: they grow with the square of the patches. */
	readonly attention: number;
	/** Products of activations with weights, which grow with the number of patches. */
	readonly towerProducts: number;
	readonly projectorProducts: number;
}

function encoderWork({ tower, projector }: Modules, grid: PatchGrid): EncoderWork {
	const { hiddenSize: c, heads, headDim, ffnHiddenSize: f, layers } = tower;
	const patches = grid.rows * grid.columns;
	const tokens = patches + tower.classTokens;
	const attended = heads * headDim;
	const { inputSize, outputSize, ffnHiddenSize } = projector;
	const projected = projector.type === "affine" ? inputSize * outputSize : ffnHiddenSize * (inputSize + outputSize);
	return {
		attention: layers * 4 * tokens * tokens * attended,
		towerProducts: 2 * patches * patchWidth(tower) * c + layers * 2 * tokens * (4 * c * attended + 2 * c * f),
		projectorProducts: 2 * outputRows(tower, grid) * projected,
	};
}

export function encoderFlops(modules: Modules, grid: PatchGrid): number {
	const { attention, towerProducts, projectorProducts } = encoderWork(modules, grid);
	return attention + towerProducts + projectorProducts;
}

/** Forward and backward over forward: products once more for inputs and once for weights; attention computes its scores anew. */
const [trainedProducts, trainedAttention] = [3, 3.5];

/**
 * Cost of training on an image, in operations that run: a·S² + b·S with the S patches of the image. A frozen tower
 * runs forward alone.
 */
export function imageCost(modules: Modules, grid: PatchGrid, frozenTower: boolean): number {
	const { attention, towerProducts, projectorProducts } = encoderWork(modules, grid);
	const tower = frozenTower
		? attention + towerProducts
		: trainedAttention * attention + trainedProducts * towerProducts;
	return tower + trainedProducts * projectorProducts;
}
