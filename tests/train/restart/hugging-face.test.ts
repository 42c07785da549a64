/** Weights of transformers in this program: what a tower, a projector and a language model from its folders compute. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { openSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { placeImageRows, placement } from "../../../src/models/vision/merge.ts";
import type { Device } from "../../../src/native/device.ts";
import { clipStatistics, Images } from "../../../src/native/images.ts";
import { World } from "../../../src/parallel/world.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { TokenSlice } from "../../../src/tensor/token-slice.ts";
import type { Run } from "../../../src/train/assemble.ts";
import { HuggingFaceWeights } from "../../../src/train/restart/hugging-face.ts";
import { openRun } from "../../../src/train/specification.ts";
import { testDevice } from "../../support.ts";
import { expectedFile, expectedTensors, fromParts, resolved } from "./vision-language.ts";

const expected = JSON.parse(readFileSync(expectedFile, "utf8")) as {
	readonly grids: readonly (readonly [number, number])[];
	readonly text_ids: readonly number[];
	readonly mixed_ids: readonly number[];
};
const [patch, imageToken, vocabulary] = [8, 5, 264];
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
	const reference = file.read(name) as Float32Array;
	expect(values.length).toBe(reference.length);
	const largest = reference.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
	return reference.reduce((most, value, i) => Math.max(most, Math.abs(value - values[i]!)), 0) / largest;
}

/** Pixels as the tool that made the reference draws them, cut and normalised as those of image files. */
function patchesOf([rows, columns]: readonly [number, number]): Float32Array {
	const [height, width] = [patch * rows, patch * columns];
	const pixels = new Uint8Array(height * width * 3);
	for (let y = 0; y < height; y++) {
		for (let x = 0; x < width; x++) {
			for (let c = 0; c < 3; c++) pixels[3 * (y * width + x) + c] = 7919 * c + 104729 * y + 1299709 * x + 31 * rows;
		}
	}
	return new Images(device.library).patches({ width, height, channels: 3, pixels }, patch, clipStatistics);
}

/** Features before pixel shuffle, and the rows that the projector makes of them. */
function encoded(): { readonly features: Float32Array; readonly rows: Tensor } {
	const grids = expected.grids.map(([rows, columns]) => ({ rows, columns }));
	const values = Float32Array.from(expected.grids.flatMap((grid) => [...patchesOf(grid)]));
	using patches = Tensor.from(device, values, [values.length / (3 * patch * patch), 3 * patch * patch]);
	let features: Float32Array = new Float32Array(0);
	const tape = new Tape(device, { recording: false });
	const input = { patches, grids, cropKey: 0, indices: [0, 1] };
	const { rows } = run.encoder!.forward(tape, input, (name, value) => {
		if (name === "radio_out") features = value.toFloat32();
	});
	return { features, rows };
}

function logitsOf(ids: readonly number[], rows: Tensor | null): Float32Array {
	const model = run.language!;
	const tokens = ids.length;
	let next = 0;
	const rowOfToken = Int32Array.from(ids, (id) => (id === imageToken ? next++ : -1));
	const text = {
		ids: Int32Array.from(ids, (id) => (id === imageToken ? -1 : id)),
		...{ labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths: [tokens] },
	};
	const tape = new Tape(device, { recording: false });
	const { tp } = model.parallel;
	using input = new DeviceInput(device, text, tp);
	using matrix = rows && placement(device, { ids: text.ids, rowOfToken, placesPerSample: [rows.rows] }, tp);
	const images = rows && {
		addToEmbedding: (embedded: Tensor) => placeImageRows(tape, embedded, rows, matrix!, tp),
	};
	using logits = model.stages[0]!.forward(tape, { ...input.forward(0, TokenSlice.of(0, tokens)), ...images }, null);
	const values = logits.toFloat32();
	return Float32Array.from(
		Array.from({ length: tokens }, (_, token) => [
			...values.subarray(token * logits.width, token * logits.width + vocabulary),
		]).flat(),
	);
}

describe("values of transformers", () => {
	test("features of a tower: RadioModel's", () => {
		const { features, rows } = encoded();
		rows[Symbol.dispose]();
		// The observer sees class tokens too, four before the patches of each image.
		const kept: number[] = [];
		let begin = 0;
		for (const [height, width] of expected.grids) {
			const count = height * width;
			kept.push(...features.subarray((begin + 4) * 32, (begin + 4 + count) * 32));
			begin += 4 + count;
		}
		expect(difference("features", Float32Array.from(kept))).toBeLessThan(vision);
	});

	test("rows of a projector with a norm", () => {
		const { rows } = encoded();
		using _ = rows;
		expect(difference("rows", rows.toFloat32())).toBeLessThan(vision);
	});

	test("logits of a language model: NemotronHForCausalLM's", () => {
		expect(difference("text_logits", logitsOf(expected.text_ids, null))).toBeLessThan(language);
	});

	test("logits of all together: NemotronH_Omni_Reasoning_V3's", () => {
		const { rows } = encoded();
		using _ = rows;
		expect(difference("mixed_logits", logitsOf(expected.mixed_ids, rows))).toBeLessThan(language);
	});
});

test("what came from where is said, with what has no place", () => {
	expect(said[0]).toMatch(
		/^Weights: language model of .*language, vision tower of .*tower, projector of .*safetensors\.$/,
	);
	expect(said.filter((sentence) => sentence.includes("is left out")).length).toBe(3);
	expect(said.at(-1)).toContain("4 layer scales are multiplied into the projections");
});
