/**
 * Operations of an image in the RADIO tower and the projector (docs/spec/vision.md §1.5, §3): forward pass, a
 * multiply-add counts 2.
 */
import type { ProjectorConfig } from "../vision/projector.ts";
import { outputRows, type PatchGrid, patchWidth, type RadioConfig } from "./config.ts";

export function encoderFlops(
	{ tower, projector }: { readonly tower: RadioConfig; readonly projector: ProjectorConfig },
	grid: PatchGrid,
): number {
	const { hiddenSize: c, heads, headDim, ffnHiddenSize: f, layers } = tower;
	const patches = grid.rows * grid.columns;
	const tokens = patches + tower.classTokens;
	const attended = heads * headDim;
	const layer = 2 * tokens * (4 * c * attended + 2 * c * f) + 4 * tokens * tokens * attended;
	const { inputSize, outputSize, ffnHiddenSize } = projector;
	const projected = projector.type === "affine" ? inputSize * outputSize : ffnHiddenSize * (inputSize + outputSize);
	return 2 * patches * patchWidth(tower) * c + layers * layer + 2 * outputRows(tower, grid) * projected;
}
