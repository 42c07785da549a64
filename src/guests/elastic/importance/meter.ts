/**
 * Measures the importance of a language model's units during forward passes (docs/spec/elastic.md §23). Each rank accumulates its
 * own units and tokens; the sum over ranks is the model's.
 */

import type { Microbatch } from "../../../data/microbatch.ts";
import { configOfLayer, type HybridConfig } from "../../../models/language/config.ts";
import type { LayerProbe, ProbedExpertRows, ProbedPass } from "../../../models/language/layer-context.ts";
import type { HybridModel } from "../../../models/language/model.ts";
import type { Device } from "../../../native/device.ts";
import type { Group } from "../../../parallel/index.ts";
import { copyInto, Tensor } from "../../../tensor/index.ts";
import type { LayerImportance } from "./importance.ts";

/** Sums of one layer, over whole units. */
interface LayerSums {
	readonly heads: Float64Array;
	readonly experts: Float64Array;
	/** Of every expert, [experts · width]. */
	readonly channels: Float64Array;
	/** Rows of every expert. */
	readonly rows: Float64Array;
}

export class ImportanceMeter {
	readonly #embedding: Float64Array;
	readonly #layers: readonly LayerSums[];

	constructor(private readonly config: HybridConfig) {
		this.#embedding = new Float64Array(config.hiddenSize);
		this.#layers = config.pattern.map((kind, index) => {
			const { mamba, attention, moe } = configOfLayer(config, index);
			const [experts, width] = kind === "moe" ? [moe.experts, moe.ffnHiddenSize] : [0, 0];
			return {
				heads: new Float64Array(kind === "mamba" ? mamba.heads : kind === "attention" ? attention.heads : 0),
				experts: new Float64Array(experts),
				channels: new Float64Array(experts * width),
				rows: new Float64Array(experts),
			};
		});
	}

	/** Adds what the layers of a rank's part of the model compute for the counted tokens of a microbatch, [T]. */
	probeOf(model: HybridModel, counted: Uint8Array): LayerProbe {
		const { tp, experts } = model.parallel;
		// Layers of MTP depths have no submodels.
		const ofLayers =
			(add: (sums: LayerSums, value: Tensor, rows?: ProbedExpertRows) => void) =>
			(value: Tensor, { layer }: ProbedPass, rows?: ProbedExpertRows) => {
				const sums = this.#layers[layer];
				if (sums !== undefined) add(sums, value, rows);
			};
		const rowsOf = (name: "channels" | "experts") =>
			ofLayers((sums, value, rows) => {
				const count = rows!.offsets.elements - 1;
				const first = experts === null ? 0 : Math.floor(experts.group.rank / experts.expertTensor) * count;
				addOfExperts(sums, name, value, rows!, first);
			});
		return {
			normed: ofLayers((_, value) => {
				addMagnitudes(this.#embedding, keptRows(value, counted, tp.rank), value.width);
			}),
			heads: ofLayers((sums, value) => {
				const heads = sums.heads.length / tp.size;
				const own = sums.heads.subarray(tp.rank * heads, (tp.rank + 1) * heads);
				addHeadNorms(own, keptRows(value, counted, tp.rank), value.width);
			}),
			// A row arrives at its expert without its token: a routing weight of zero tells the rows that do not count.
			routing: ofLayers((_, value) => {
				using kept = Tensor.from(value.device, keptRows(value, counted, tp.rank), value.shape);
				copyInto(kept, value);
			}),
			channels: rowsOf("channels"),
			experts: rowsOf("experts"),
		};
	}

	/** Means of everything that all ranks of `world` added, which call this together. */
	finish(
		device: Device,
		world: Group,
	): { readonly embedding: number[]; readonly layers: Omit<LayerImportance, "layer">[] } {
		const parts = [
			this.#embedding,
			...this.#layers.flatMap((sums) => [sums.heads, sums.experts, sums.channels, sums.rows]),
		];
		const all = new Float64Array(parts.reduce((length, part) => length + part.length, 0));
		let at = 0;
		for (const part of parts) {
			all.set(part, at);
			at += part.length;
		}
		if (world.size > 1) {
			using total = Tensor.from(device, all);
			world.allReduce(total).wait();
			device.copyToHost(all, total);
		}
		at = 0;
		const take = (count: number) => {
			at += count;
			return [...all.subarray(at - count, at)];
		};
		const embedding = take(this.#embedding.length);
		const layers = this.#layers.map((sums, index) => {
			const kind = this.config.pattern[index];
			const [heads, outputs, channels, rows] = [
				take(sums.heads.length),
				take(sums.experts.length),
				take(sums.channels.length),
				take(sums.rows.length),
			];
			if (kind === "mlp") return {};
			if (kind !== "moe") return { heads };
			const mean = (sum: number, expert: number) => sum / Math.max(1, rows[expert]!);
			const width = channels.length / outputs.length;
			return {
				experts: outputs.map(mean),
				channels: outputs.map((_, expert) =>
					channels.slice(expert * width, (expert + 1) * width).map((sum) => mean(sum, expert)),
				),
			};
		});
		return { embedding, layers };
	}
}

/** The values of a rank's rows, with zeros in those of tokens that do not count. */
function keptRows(value: Tensor, counted: Uint8Array, rank: number): Float32Array {
	const values = value.toFloat32();
	const { width } = value;
	for (const [row, counts] of countedRows(counted, values.length / width, rank).entries()) {
		if (counts === 0) values.fill(0, row * width, (row + 1) * width);
	}
	return values;
}

/** sums_i += Σ_rows |x_i|. */
function addMagnitudes(sums: Float64Array, values: Float32Array, width: number): void {
	for (let i = 0; i < values.length; i++) sums[i % width]! += Math.abs(values[i]!);
}

/** sums_h += Σ_rows of the norm of head h's channels. */
function addHeadNorms(sums: Float64Array, values: Float32Array, width: number): void {
	const size = width / sums.length;
	for (let i = 0; i < values.length; i += size) {
		let square = 0;
		for (let j = i; j < i + size; j++) square += values[j]! ** 2;
		sums[(i % width) / size]! += Math.sqrt(square);
	}
}

/** Adds rows that lie by expert; `first` is this rank's first expert. */
function addOfExperts(
	sums: LayerSums,
	name: "channels" | "experts",
	value: Tensor,
	{ offsets: firstRows, rowProbability }: ProbedExpertRows,
	first: number,
): void {
	const values = value.toFloat32();
	const { width } = value;
	const offsets = firstRows.toInt32();
	const weights = rowProbability.toFloat32();
	for (let expert = 0; expert + 1 < offsets.length; expert++) {
		const own = values.subarray(offsets[expert]! * width, offsets[expert + 1]! * width);
		if (name === "experts") {
			const counted = weights.subarray(offsets[expert]!, offsets[expert + 1]!).filter((weight) => weight !== 0);
			sums.rows[first + expert]! += counted.length;
			addHeadNorms(sums.experts.subarray(first + expert, first + expert + 1), own, width);
		} else {
			addMagnitudes(sums.channels.subarray((first + expert) * width, (first + expert + 1) * width), own, width);
		}
	}
}

// The tokens that importance is measured on.

/**
 * [T]: 1 for tokens on which a loss depends, those with a counting label or before one in their sequence. The others (padding,
 * samples that only fill a lane) affect no loss, and their number depends on the layout.
 */
export function countedTokens({ lossMask, lengths }: Pick<Microbatch, "lossMask" | "lengths">): Uint8Array {
	const counted = new Uint8Array(lossMask.length);
	let begin = 0;
	for (const length of lengths) {
		const last = lossMask.subarray(begin, begin + length).findLastIndex((value) => value > 0);
		counted.fill(1, begin, begin + last + 1);
		begin += length;
	}
	return counted;
}

/** Of all tokens, those that a rank's rows hold: all, or its equal run of them between layers. */
export function countedRows(counted: Uint8Array, rows: number, rank: number): Uint8Array {
	return rows === counted.length ? counted : counted.subarray(rank * rows, (rank + 1) * rows);
}
