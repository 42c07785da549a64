/** The smallest tower: y = GELU(W x) of each frame by itself. Frames of a sound, or of any other series, become rows. */
import { columnParallelLinear, gatherColumns } from "../../parallel/index.ts";
import { activation, type FloatDtype } from "../../tensor/index.ts";
import type { Tower } from "../tower.ts";
import { encoderPrefix } from "../vision/encoder.ts";

export interface FrameTowerConfig {
	/** The encoder's name, in its parameters'. */
	readonly name: string;
	/** Values of a frame. */
	readonly frameWidth: number;
	readonly hiddenSize: number;
	readonly initMethodStd: number;
	readonly dtype: FloatDtype;
}

export function frameTower({ name, frameWidth, hiddenSize, initMethodStd, dtype }: FrameTowerConfig): Tower {
	const weight = `${encoderPrefix(name)}encoders.${name}.linear_fc1.weight`;
	return {
		dtype,
		patchWidth: frameWidth,
		outputWidth: hiddenSize,
		stream: null,
		parameters: () => [
			{
				name: weight,
				shape: [hiddenSize, frameWidth],
				initialisation: { kind: "normal", standardDeviation: initMethodStd },
				shard: { kind: "split", dimension: 0 },
			},
		],
		lora: null,
		rowsOf: ({ rows, columns }) => rows * columns,
		workOf: ({ rows, columns }) => ({ attention: 0, products: 2 * rows * columns * frameWidth * hiddenSize }),
		forward(tape, { tp, parameters }, { patches }, observe) {
			tape.begin(`${name}.tower`);
			using part = columnParallelLinear(tape, patches, parameters.get(weight), null, tp);
			using activated = activation(tape, part, "geluTanh");
			const features = gatherColumns(tape, activated, tp);
			observe?.("tower", features);
			return features;
		},
	};
}
