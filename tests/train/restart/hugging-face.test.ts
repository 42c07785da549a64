/** Weights of transformers in this program: what a tower, a projector and a language model from its folders compute. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { openSafetensors } from "../../../src/checkpoint/safetensors.ts";
import type { Device } from "../../../src/native/device.ts";
import { World } from "../../../src/parallel/world.ts";
import type { Tensor } from "../../../src/tensor/tensor.ts";
import type { Run } from "../../../src/train/assemble.ts";
import { openRun } from "../../../src/train/from-configuration.ts";
import { HuggingFaceWeights } from "../../../src/train/restart/hugging-face.ts";
import { testDevice } from "../../support.ts";
import { encodedPictures, largestDifference, logitsOf } from "./forward.ts";
import { expectedFile, expectedTensors, fromParts, resolved } from "./vision-language.ts";

const expected = JSON.parse(readFileSync(expectedFile, "utf8")) as {
	readonly grids: readonly (readonly [number, number])[];
	readonly text_ids: readonly number[];
	readonly mixed_ids: readonly number[];
};
/** Largest differences, of the largest value. transformers computes Mamba's scan and the norms in float32 even in a float64 model. */
const [vision, language] = [2e-6, 5e-6];

let device: Device;
let run: Run;
let said: string[];
beforeAll(async () => {
	device = await testDevice();
	const { configuration } = resolved(...fromParts, "--llm-offset", "0");
	const world = World.alone(device);
	run = await openRun(configuration, world);
	using weights = await HuggingFaceWeights.open(configuration, run, world);
	said = weights.load();
});
afterAll(() => {
	run[Symbol.dispose]();
	device[Symbol.dispose]();
});

/** The largest difference from transformers' float64 values, in units of the largest of them. */
function difference(name: string, values: Float32Array): number {
	using file = openSafetensors(expectedTensors);
	return largestDifference(values, file.read(name) as Float32Array);
}

const encoded = () => encodedPictures(device, run, expected.grids);
const logits = (ids: readonly number[], rows: Tensor | null) =>
	logitsOf(device, run, ids, rows, { imageToken: 5, vocabulary: 264 });

describe("values of transformers", () => {
	test("features of a tower: RadioModel's", () => {
		const { features, rows } = encoded();
		rows[Symbol.dispose]();
		expect(difference("features", features)).toBeLessThan(vision);
	});

	test("rows of a projector with a norm", () => {
		const { rows } = encoded();
		using _ = rows;
		expect(difference("rows", rows.toFloat32())).toBeLessThan(vision);
	});

	test("logits of a language model: NemotronHForCausalLM's", () => {
		expect(difference("text_logits", logits(expected.text_ids, null))).toBeLessThan(language);
	});

	test("logits of all together: NemotronH_Omni_Reasoning_V3's", () => {
		const { rows } = encoded();
		using _ = rows;
		expect(difference("mixed_logits", logits(expected.mixed_ids, rows))).toBeLessThan(language);
	});
});

test("what came from where is said, with what has no place", () => {
	expect(said[0]).toMatch(
		/^Weights: language model of .*language, vision tower of .*tower, projector of .*safetensors\.$/,
	);
	expect(said.filter((sentence) => sentence.includes("is left out")).length).toBe(3);
	expect(said.at(-1)).toContain("4 layer scales are multiplied into the projections");
});
