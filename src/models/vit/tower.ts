/** RADIO as the tower of an encoder. */
import { visionModule } from "../../parallel/index.ts";
import { philoxKey } from "../initialise.ts";
import { philox4x32 } from "../philox.ts";
import type { PatchGrid, Tower, TowerWork } from "../tower.ts";
import type { EncoderConfig, EncoderParts } from "../vision/encoder.ts";
import { checkVitConfig, outputRows, outputWidth, patchWidth, type VitConfig } from "./config.ts";
import { VitModel } from "./model.ts";
import { vitParameters } from "./names.ts";
import { PackedImages } from "./packing.ts";
import type { PositionCrop } from "./positions.ts";

/** The encoder that Megatron's flags describe. */
export function visionEncoder({ tower, projector }: EncoderConfig): EncoderParts {
	return { name: visionModule, tower: vitTower(tower), projector };
}

/** Throws a UserError where options contradict each other. */
function vitTower(config: VitConfig): Tower {
	checkVitConfig(config);
	const { mode, randomCrop } = config.positions;
	return {
		dtype: config.dtype,
		patchWidth: patchWidth(config),
		outputWidth: outputWidth(config),
		stream: {
			layers: config.layers,
			widthBehind: (layers) => config.hiddenSize * (1 + config.taps.filter((tap) => tap < layers).length),
			rowsOf: ({ rows, columns }) => config.classTokens + rows * columns,
			windowed: config.windows !== null,
		},
		parameters: (segment) => vitParameters(config, segment),
		lora: config.lora,
		rowsOf: (grid) => outputRows(config, grid),
		workOf: (grid) => vitWork(config, grid),
		forward(tape, { device, tp, parameters, segment }, { patches, grids, random }, observe) {
			// Random windows of the position table; without them the whole table is used (docs/spec/vision.md §1.8).
			const crops =
				random !== null && mode === "cpe" && randomCrop
					? random.indices.map((index) => cropOfImage(random.key, index))
					: null;
			using packed = new PackedImages(device, config, grids, crops, segment);
			return new VitModel(config, tp, parameters, segment).forward(tape, patches, packed, observe);
		},
	};
}

// The window of the position table an image is trained on (docs/spec/vision.md §1.4): drawn from Philox 4x32-10 with
// the image's number in the step's global batch as counter, so that no layout changes it.

const f32 = Math.fround;
const smallestScale = Math.sqrt(0.1);
const [lowAspect, highAspect] = [Math.log(3 / 4), Math.log(4 / 3)];

/** Scale, aspect and offset uniform as upstream draws them; `image`: its number there. */
export function cropOfImage(stepKey: number, image: number): PositionCrop {
	const words = philox4x32(philoxKey(stepKey, "position_crop"), image);
	const [scale, aspect, alongX, alongY] = words.map((word) => (word >>> 8) / 2 ** 24) as [
		number,
		number,
		number,
		number,
	];
	const z = f32(smallestScale + scale * (1 - smallestScale));
	const ratio = f32(Math.exp(lowAspect + aspect * (highAspect - lowAspect)));
	const width = Math.min(1, f32(z * ratio));
	const height = Math.min(1, f32(z / ratio));
	return { x: f32(alongX * f32(1 - width)), y: f32(alongY * f32(1 - height)), width, height };
}

// Operations of an image in the RADIO tower (docs/spec/vision.md §1.5), and of any encoder's item in tower and projector: forward
// pass, a multiply-add counts 2.

/** Attention grows with the square of the patches, products with their number. */
function vitWork(config: VitConfig, grid: PatchGrid): TowerWork {
	const { hiddenSize: c, heads, headDim, ffnHiddenSize: f, layers, windows } = config;
	const patches = grid.rows * grid.columns;
	const tokens = patches + config.classTokens;
	const attended = heads * headDim;
	// Columns of scores of a token, over all layers: those of its window, or of its image.
	const full = windows?.full.filter((layer) => layer < layers).length ?? layers;
	const scores = full * tokens + (layers - full) * Math.min(tokens, (windows?.side ?? 0) ** 2);
	const fed = config.activation === "swiglu" ? 3 * c * f : 2 * c * f;
	return {
		attention: 4 * tokens * scores * attended,
		products: 2 * patches * patchWidth(config) * c + layers * 2 * tokens * (4 * c * attended + fed),
	};
}

function projectorWork({ tower, projector }: EncoderParts, grid: PatchGrid): number {
	const { inputSize, outputSize, ffnHiddenSize, stem } = projector;
	const joined = outputSize * (inputSize + outputSize);
	const into = (projector.activation === "swiglu" ? 2 : 1) * (stem ? outputSize : inputSize);
	const fed = ffnHiddenSize * (into + outputSize) + (stem ? joined : 0);
	return 2 * tower.rowsOf(grid) * (projector.type === "affine" ? inputSize * outputSize : fed);
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
