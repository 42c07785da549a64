/** Outputs of an opened vision-language model for pictures and for ids, to be compared with transformers. */
import { DeviceInput } from "../../../src/data/device-input.ts";
import { placeImageRows, placement } from "../../../src/models/vision/merge.ts";
import type { Device } from "../../../src/native/device.ts";
import { clipStatistics, Images } from "../../../src/native/images.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import type { Run } from "../../../src/train/assemble.ts";

/** Rows and columns of patches. */
type Grid = readonly [rows: number, columns: number];

const patch = 8;
/** Class tokens and registers before the patches of an image. */
const prefix = 4;

/** Pixels as tests/golden/tools/make_vision_language.py draws them, cut and normalised as those of image files. */
function patchesOf(device: Device, [rows, columns]: Grid): Float32Array {
	const [height, width] = [patch * rows, patch * columns];
	const pixels = new Uint8Array(height * width * 3);
	for (let y = 0; y < height; y++) {
		for (let x = 0; x < width; x++) {
			for (let c = 0; c < 3; c++) pixels[3 * (y * width + x) + c] = 7919 * c + 104729 * y + 1299709 * x + 31 * rows;
		}
	}
	return new Images(device.library).patches({ width, height, channels: 3, pixels }, patch, clipStatistics);
}

/** Features of the patches before pixel shuffle, and the rows that the projector makes of them. */
export function encodedPictures(
	device: Device,
	run: Run,
	given: readonly Grid[],
): { readonly features: Float32Array; readonly rows: Tensor } {
	const grids = given.map(([rows, columns]) => ({ rows, columns }));
	const values = Float32Array.from(given.flatMap((grid) => [...patchesOf(device, grid)]));
	using patches = Tensor.from(device, values, [values.length / (3 * patch * patch), 3 * patch * patch]);
	let [all, width]: [Float32Array, number] = [new Float32Array(0), 0];
	const tape = new Tape(device, { recording: false });
	const input = { patches, grids, cropKey: 0, indices: [...given.keys()] };
	const rows = run.encoder!.forward(tape, input, (name, value) => {
		if (name === "radio_out") [all, width] = [value.toFloat32(), value.width];
	});
	const features: number[] = [];
	let begin = 0;
	for (const [height, columns] of given) {
		const count = height * columns;
		features.push(...all.subarray((begin + prefix) * width, (begin + prefix + count) * width));
		begin += prefix + count;
	}
	return { features: Float32Array.from(features), rows };
}

/** Logits of the first `vocabulary` tokens after each id; `rows` stand where the ids have the image token. */
export function logitsOf(
	device: Device,
	run: Run,
	ids: readonly number[],
	rows: Tensor | null,
	{ imageToken, vocabulary }: { readonly imageToken: number; readonly vocabulary: number },
): Float32Array {
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
	using input = new DeviceInput(device, text, model.parallel);
	using matrix = rows && placement(device, { ids: text.ids, rowOfToken, placesPerSample: [rows.rows] }, tp);
	const images = rows && {
		addToEmbedding: (embedded: Tensor) => placeImageRows(tape, embedded, rows, matrix!, tp),
	};
	using logits = model.chunks[0]!.forward(tape, { ...input.forward(0, TokenSlice.of(0, tokens)), ...images }, null);
	const values = logits.toFloat32();
	return Float32Array.from(
		Array.from({ length: tokens }, (_, token) => [
			...values.subarray(token * logits.width, token * logits.width + vocabulary),
		]).flat(),
	);
}

/** The largest difference, in units of the largest value of the reference; infinite where there are others. */
export function largestDifference(values: Float32Array, reference: Float32Array): number {
	if (values.length !== reference.length) return Number.POSITIVE_INFINITY;
	const largest = reference.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
	return reference.reduce((most, value, i) => Math.max(most, Math.abs(value - values[i]!)), 0) / largest;
}
