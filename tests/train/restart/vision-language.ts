/** The tiny vision-language model of examples/shapes and tests/golden/vision-language, and flags that start from its parts. */
import { join } from "node:path";
import { readModelKeys } from "../../../src/checkpoint/hf/model-keys.ts";
import { type ResolvedConfiguration, resolveConfiguration } from "../../../src/config/resolve.ts";
import { deviceFlags } from "../../commands/mimo.ts";
import { golden } from "../../golden.ts";

const folder = golden("vision-language");

export const parts = {
	language: join(import.meta.dir, "../../../examples/shapes/language"),
	tower: join(import.meta.dir, "../../../examples/shapes/tower"),
	projector: join(folder, "projector.safetensors"),
};

export const expectedFile = join(folder, "expected.json");
export const expectedTensors = join(folder, "expected.safetensors");

export const fromParts = [
	...["--load-hf", parts.language, "--load-vision", parts.tower, "--load-projector", parts.projector],
];

/** One step at a learning rate of 0 on mock data: the weights stay as they are. */
export const still =
	`--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 0 --min-lr 0 --moe-router-bias-update-rate 0 ${deviceFlags}`.split(
		" ",
	);

export function resolved(...flags: readonly string[]): ResolvedConfiguration {
	return resolveConfiguration([...flags, ...still], {}, { folders: readModelKeys });
}
