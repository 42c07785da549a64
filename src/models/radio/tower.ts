/** RADIO as the tower of an encoder. */
import { visionModule } from "../../parallel/index.ts";
import type { Tower } from "../tower.ts";
import type { EncoderConfig, EncoderParts } from "../vision/encoder.ts";
import { checkRadioConfig, outputRows, outputWidth, patchWidth, type RadioConfig } from "./config.ts";
import { radioWork } from "./counts.ts";
import { RadioModel } from "./model.ts";
import { radioParameters } from "./names.ts";
import { PackedImages } from "./packing.ts";
import { cropOfImage } from "./random-crop.ts";

/** The encoder that Megatron's flags describe. */
export function visionEncoder({ tower, projector }: EncoderConfig): EncoderParts {
	return { name: visionModule, tower: radioTower(tower), projector };
}

/** Throws a UserError where options contradict each other. */
function radioTower(config: RadioConfig): Tower {
	checkRadioConfig(config);
	const { mode, randomCrop } = config.positions;
	return {
		dtype: config.dtype,
		patchWidth: patchWidth(config),
		outputWidth: outputWidth(config),
		stream: {
			layers: config.layers,
			width: config.hiddenSize,
			rowsOf: ({ rows, columns }) => config.classTokens + rows * columns,
		},
		parameters: (segment) => radioParameters(config, segment),
		lora: config.lora,
		rowsOf: (grid) => outputRows(config, grid),
		workOf: (grid) => radioWork(config, grid),
		forward(tape, { device, tp, parameters, segment }, { patches, grids, random }, observe) {
			// Random windows of the position table; without them the whole table is used (docs/spec/vision.md §1.8).
			const crops =
				random !== null && mode === "cpe" && randomCrop
					? random.indices.map((index) => cropOfImage(random.key, index))
					: null;
			using packed = new PackedImages(device, config, grids, crops, segment);
			return new RadioModel(config, tp, parameters, segment).forward(tape, patches, packed, observe);
		},
	};
}
