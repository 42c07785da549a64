/** Greedy decoding: the likeliest next token again and again, every pass over the whole sequence so far. */

import { DeviceInput } from "../data/device-input.ts";
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { placeImageRows, placement } from "../models/vision/merge.ts";
import type { Edge } from "../parallel/edge.ts";
import type { Group } from "../parallel/group.ts";
import { pickRows, SparseMatrix, spmm } from "../tensor/ops/spmm.ts";
import { Tape } from "../tensor/tape.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { TokenSlice } from "../tensor/token-slice.ts";

export interface Prompts {
	/** Token ids of every sequence; an image token stands for each of its image rows. */
	readonly ids: readonly (readonly number[])[];
	/** [R, H]: rows of all image tokens, in order, on every tensor-parallel rank; null: text alone. */
	readonly rows: Tensor | null;
	readonly imageTokenId: number;
}

export interface DecodingLimits {
	/** A sequence ends with this token, which is not part of what is returned. */
	readonly endId: number;
	/** Tokens a sequence may get. */
	readonly most: number;
	/** Language ranks that must pass through the model equally often: those that share its experts. */
	readonly group: Group;
	/** The pipeline's stages, one rank each, and the edges between their chunks. */
	readonly stages: Group;
	readonly edges: ReadonlyMap<number, Edge>;
}

interface Sequence {
	/** Text ids; −1 at image tokens. */
	readonly ids: number[];
	/** Image row of every token; −1 for text. */
	readonly rows: number[];
	readonly prompt: number;
	finished: boolean;
}

/** The ids of every sequence of a microbatch. */
export function splitIds({ ids, lengths }: Pick<Microbatch, "ids" | "lengths">): number[][] {
	let begin = 0;
	return lengths.map((length) => {
		begin += length;
		return [...ids.subarray(begin - length, begin)];
	});
}

/** What follows each prompt. Every rank of `group`, in every stage, calls this together. */
export function decodeGreedily(model: HybridModel, prompts: Prompts, limits: DecodingLimits): number[][] {
	const { endId, most, group } = limits;
	const sequences = sequencesOf(prompts);
	for (let pass = 0; pass < most; pass++) {
		const unfinished = sequences.filter(({ finished }) => !finished);
		if (!group.exchange(Int32Array.of(unfinished.length)).some(([count]) => count! > 0)) break;
		// A rank that is done passes through the model with the others all the same.
		const active = unfinished.length > 0 ? unfinished : sequences.slice(0, 1);
		const next = nextTokens(model, active, prompts.rows, limits);
		for (const [index, sequence] of active.entries()) {
			if (sequence.finished) continue;
			const id = next[index]!;
			if (id === endId) sequence.finished = true;
			else {
				sequence.ids.push(id);
				sequence.rows.push(-1);
			}
		}
	}
	return sequences.map(({ ids, prompt }) => ids.slice(prompt));
}

function sequencesOf({ ids, imageTokenId }: Prompts): Sequence[] {
	let row = 0;
	return ids.map((own) => {
		const rows = own.map((id) => (id === imageTokenId ? row++ : -1));
		return { ids: own.map((id, i) => (rows[i] === -1 ? id : -1)), rows, prompt: own.length, finished: false };
	});
}

/** The likeliest next token of every sequence, on every stage. */
function nextTokens(
	model: HybridModel,
	sequences: readonly Sequence[],
	rows: Tensor | null,
	{ stages, edges }: DecodingLimits,
): number[] {
	const { device, parallel } = model;
	const { tp } = parallel;
	// Equal runs of the tokens for the tensor-parallel ranks: what follows a sequence's last token changes nothing.
	const lengths = sequences.map(({ ids }) => Math.ceil(ids.length / tp.size) * tp.size);
	const tokens = lengths.reduce((sum, length) => sum + length, 0);
	const ids = new Int32Array(tokens);
	const rowOfToken = new Int32Array(tokens).fill(-1);
	const last: number[] = [];
	let begin = 0;
	for (const [index, sequence] of sequences.entries()) {
		ids.set(sequence.ids, begin);
		rowOfToken.set(sequence.rows, begin);
		last.push(begin + sequence.ids.length - 1);
		begin += lengths[index]!;
	}
	const tape = new Tape(device, { recording: false });
	const text = { ids, labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths };
	using input = new DeviceInput(device, text, tp);
	const places = { ids, rowOfToken, placesPerSample: [rows?.rows ?? 0] };
	using matrix = rows && placement(device, places, tp);
	const images = rows && {
		addToEmbedding: (embedded: Tensor) => placeImageRows(tape, embedded, rows, matrix!, tp),
	};
	const forward = { ...input.forward(0, TokenSlice.of(0, tokens)), ...images };
	let found: number[] = new Array<number>(last.length).fill(0);
	for (const [virtual, stage] of model.stages.entries()) {
		const chunk = virtual * stages.size + stages.rank;
		const entered = chunk === 0 ? null : edges.get(chunk)!.receiveForward(tokens / tp.size, false);
		using hidden = entered?.rows ?? null;
		using result = stage.forward(tape, forward, hidden);
		if (stage.segment.hasHead) {
			using picker = new SparseMatrix(device, pickRows(last, tokens));
			using picked = spmm(tape, picker, result);
			found = likeliest(model, picked);
		} else edges.get(chunk + 1)!.sendForward({ rows: result, rowsPerSample: [] }, false);
	}
	for (const [chunk, edge] of edges) if (chunk > 0) edge.settle();
	return [...stages.exchange(Int32Array.from(found)).at(-1)!];
}

/** Largest of each row, whose columns are this rank's part of the vocabulary; the lowest id of equal ones. */
function likeliest(model: HybridModel, logits: Tensor): number[] {
	const { start, live } = model.vocabularyShard;
	const values = logits.toFloat32();
	const { width } = logits;
	const ids = new Int32Array(logits.rows);
	const best = new Float32Array(logits.rows).fill(Number.NEGATIVE_INFINITY);
	for (let row = 0; row < logits.rows; row++) {
		for (let column = 0; column < live; column++) {
			const value = values[row * width + column]!;
			if (value > best[row]!) [best[row], ids[row]] = [value, start + column];
		}
	}
	const { tp } = model.parallel;
	const everyone = tp
		.exchange(Int32Array.of(...ids, ...new Int32Array(best.buffer)))
		.map((found) => ({ ids: found.subarray(0, ids.length), best: new Float32Array(found.slice(ids.length).buffer) }));
	return Array.from(ids, (_, row) => everyone.reduce((a, b) => (b.best[row]! > a.best[row]! ? b : a)).ids[row]!);
}
