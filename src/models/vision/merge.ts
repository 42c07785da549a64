/**
 * Merges image rows into the token embeddings (docs/spec/vision.md §4.1): a sequence holds one image token for each image row,
 * and the k-th image token of a microbatch takes the k-th row. An image token's own embedding is zero.
 */

import type { Device } from "../../native/device.ts";
import { copyToTensorParallel, type Group, visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import {
	joinColumns,
	pickRows,
	SparseMatrix,
	splitColumns,
	spmm,
	type Tape,
	type Tensor,
	TokenSlice,
} from "../../tensor/index.ts";
import type { HybridConfig } from "../language/config.ts";
import type { ForwardInput } from "../language/model-chunk.ts";

/** An id outside any vocabulary, which embeds as zeros. */
const noToken = -1;

/** Positions of a microbatch's image tokens. */
export interface ImagePlaces {
	/** Token ids for the embedding, with image tokens replaced by noToken. */
	readonly ids: Int32Array;
	/** Image row of each token; −1 for text. */
	readonly rowOfToken: Int32Array;
	readonly placesPerSample: readonly number[];
}

/** Finds the image tokens. `lengths`: tokens of each sample, in order. */
export function findImagePlaces(ids: Int32Array, lengths: readonly number[], imageTokenId: number): ImagePlaces {
	const text = ids.slice();
	const rowOfToken = new Int32Array(ids.length).fill(-1);
	let [token, row] = [0, 0];
	const placesPerSample = lengths.map((length) => {
		const first = row;
		for (const end = token + length; token < end; token++) {
			if (ids[token] !== imageTokenId) continue;
			text[token] = noToken;
			rowOfToken[token] = row++;
		}
		return row - first;
	});
	return { ids: text, rowOfToken, placesPerSample };
}

/** Throws a UserError unless each sample has as many rows of `module` as tokens for them. `place`: such as "microbatch 3". */
export function checkImageRows(
	places: ImagePlaces,
	rowsPerSample: readonly number[],
	{ module, place: where }: { readonly module: string; readonly place: string },
): void {
	const what = module === visionModule ? "image" : module;
	const { placesPerSample } = places;
	if (rowsPerSample.length !== placesPerSample.length) {
		throw new UserError(
			`${where} has ${counted(placesPerSample.length, "sample")} of text and ${rowsPerSample.length} of ${what} rows.`,
		);
	}
	for (const [sample, tokens] of placesPerSample.entries()) {
		if (tokens !== rowsPerSample[sample]) {
			throw new UserError(
				`Sample ${sample} of ${where} has ${counted(tokens, `${what} token`)} but ${counted(rowsPerSample[sample] ?? 0, `${what} row`)}.`,
			);
		}
	}
}

/** The sparse matrix that places a microbatch's image rows in this rank's run of tokens. */
export function placement(device: Device, { rowOfToken, placesPerSample }: ImagePlaces, ranks: Group): SparseMatrix {
	const { ranges } = TokenSlice.of(0, rowOfToken.length).cut(ranks);
	const own = Int32Array.from(ranges.flatMap(({ first, count }) => [...rowOfToken.subarray(first, first + count)]));
	const rows = placesPerSample.reduce((sum, count) => sum + count, 0);
	return new SparseMatrix(device, pickRows(own, rows));
}

/**
 * y = embedded with each image row at its token; embedded_(T/tp)H is zero there. rows_RH are all rows of the microbatch; their
 * gradient is all-reduced over `ranks`, which each hold a run of the tokens.
 */
export function placeImageRows(
	tape: Tape,
	embedded: Tensor,
	rows: Tensor,
	placement: SparseMatrix,
	ranks: Group,
): Tensor {
	using entered = copyToTensorParallel(tape, rows, ranks);
	return spmm(tape, placement, entered, { base: embedded });
}

/** Where rows enter the language model, and by what they are read. */
interface Placing {
	readonly matrices: readonly SparseMatrix[];
	/** The ranks that each hold a run of the tokens. */
	readonly ranks: Group;
	readonly config: Pick<HybridConfig, "hiddenSize" | "pattern">;
	/** Takes over what is needed until the pass ends. */
	readonly own: <Owned extends Disposable>(owned: Owned) => Owned;
}

/**
 * Adds rows of several sources to the embedding, each by its matrix; nothing without sources. Of rows that are several times as wide
 * as the model the first part goes there, and the j-th other one to the hidden states behind the j-th MLP or layer of experts
 * (DeepStack, docs/spec/vision.md §4.7).
 */
export function placingRows(
	tape: Tape,
	sources: readonly Tensor[],
	{ matrices, ranks, config, own }: Placing,
): Pick<ForwardInput, "addToEmbedding" | "behind"> {
	if (matrices.length === 0) return {};
	const parts = sources.map((rows) => partsOf(tape, rows, config.hiddenSize, own));
	const rows = parts.map(([first]) => first!);
	const layers = feedForwardLayers(config);
	const behind = new Map<number, (tape: Tape, hidden: Tensor) => Tensor>();
	for (const [source, [, ...deep]] of parts.entries()) {
		for (const [j, part] of deep.slice(0, layers.length).entries()) {
			behind.set(layers[j]!, (on, hidden) => placeImageRows(on, hidden, part, matrices[source]!, ranks));
		}
	}
	const add = (embedded: Tensor, index: number): Tensor => {
		const placed = placeImageRows(tape, embedded, rows[index]!, matrices[index]!, ranks);
		if (index + 1 === matrices.length) return placed;
		using _placed = placed;
		return add(placed, index + 1);
	};
	return { addToEmbedding: (embedded) => add(embedded, 0), ...(behind.size > 0 && { behind }) };
}

/** Runs of columns of the model's width, each contiguous. */
function partsOf(tape: Tape, rows: Tensor, width: number, own: Placing["own"]): Tensor[] {
	if (rows.width === width) return [rows];
	const windows = splitColumns(tape, rows, new Array<number>(rows.width / width).fill(width));
	return windows.map((window) => {
		using _window = window;
		return own(joinColumns(tape, [window]));
	});
}

/** Indices of the main layers with an MLP or experts. */
function feedForwardLayers({ pattern }: Pick<HybridConfig, "pattern">): number[] {
	return pattern.flatMap((kind, layer) => (kind === "mlp" || kind === "moe" ? [layer] : []));
}
