/**
 * Decodes: one prefill over all prompts fills the cache, then each step adds a token to every unfinished sequence. Collective
 * over the ranks of the language model, in any layout.
 */
import { DeviceInput } from "../data/device-input.ts";
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { ForwardInput } from "../models/language/model-chunk.ts";
import { placement, placingRows } from "../models/vision/merge.ts";
import { type Edge, type Group, gatherColumns } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { pickRows, Sequences, SparseMatrix, Tape, Tensor, TokenSlice } from "../tensor/index.ts";
import { DecodingCache } from "./cache.ts";
import { choose, type SamplingOptions, uniformsOf } from "./sampling.ts";

export interface Prompts {
	/** Token ids of every sequence; an image token stands for each of its image rows. */
	readonly ids: readonly (readonly number[])[];
	/** [R, H] or with DeepStack's rows beside: rows of all image tokens, in order, on every tensor-parallel rank; null: text alone. */
	readonly rows: Tensor | null;
	/** As in Microbatch, of the tokens of all sequences. */
	readonly positions?: Int32Array | undefined;
	readonly imageTokenId: number;
	/**
	 * Number of every sequence in its run, which random numbers follow; default: its place here. Sequences past them fill up
	 * what lanes must have equally many of, and get no tokens.
	 */
	readonly numbers?: readonly number[];
}

export interface DecodingOptions {
	/** A sequence ends with one of these tokens, which is not part of what is returned. */
	readonly endIds: readonly number[];
	/** Tokens a sequence may get, at least one. */
	readonly most: number;
	readonly sampling: SamplingOptions;
	/**
	 * Called with every token that is returned, as it arises, and the place of its sequence, which ends unless it returns true; all
	 * ranks return the same.
	 */
	readonly onToken?: (sequence: number, id: number) => boolean;
}

/** The ranks that decode together. */
export interface DecodingRanks {
	/** Language ranks that have to run the model equally often, because they share experts. */
	readonly group: Group;
	/** The pipeline's stages, one rank each, and the edges between their chunks. */
	readonly stages: Group;
	readonly edges: ReadonlyMap<number, Edge>;
}

/** Seconds of a rank's passes, and tokens of its lane. */
export interface DecodingTimes {
	readonly prefill: { readonly tokens: number; readonly seconds: number };
	readonly decode: { readonly tokens: number; readonly seconds: number };
}

export interface Decoded {
	/** The ids that follow each prompt. */
	readonly ids: readonly (readonly number[])[];
	readonly times: DecodingTimes;
}

/** The ids of every sequence of a microbatch. */
export function splitIds({ ids, lengths }: Pick<Microbatch, "ids" | "lengths">): number[][] {
	let begin = 0;
	return lengths.map((length) => {
		begin += length;
		return [...ids.subarray(begin - length, begin)];
	});
}

/** Throws a UserError if this rank holds a part of a microbatch's tokens within layers. */
export function requireAllTokens({ parallel: { cp } }: Pick<HybridModel, "parallel">): void {
	if (cp.size > 1) throw new UserError(`llm-cp is ${cp.size}; allowed here is 1.`, exitCodes.usage);
}

/** Continues prompts of at least one token each. Every rank of the groups, in every stage, calls this together. */
export function decode(model: HybridModel, prompts: Prompts, options: DecodingOptions, ranks: DecodingRanks): Decoded {
	const { endIds, most, sampling } = options;
	const { device, parallel } = model;
	requireAllTokens(model);
	const numbers = prompts.numbers ?? prompts.ids.map((_, index) => index);
	const uniforms =
		sampling.temperature === 0 ? null : numbers.map((number) => uniformsOf(device, sampling.seed, number, most));
	const lengths = withSpares(
		prompts.ids.map(({ length }) => length),
		parallel.tp.size,
	);
	using cache = new DecodingCache(
		device,
		lengths.map((length, index) => (index < prompts.ids.length ? length + most : Math.max(1, length))),
	);
	const continued: number[][] = prompts.ids.map(() => []);
	let active = numbers.map((_, index) => index);
	/** Appends the sampled tokens, and returns the sequences that continue. */
	const take = (sequences: readonly number[], logits: Logits | null): number[] => {
		const own = Int32Array.from(sequences, (sequence, row) => {
			if (logits === null) return 0;
			const uniform = uniforms === null ? 0 : uniforms[sequence]![continued[sequence]!.length]!;
			return choose(logits.row(row), sampling, uniform);
		});
		// The last stage has the head.
		const chosen = ranks.stages.exchange(own).at(-1)!;
		return sequences.filter((sequence, row) => {
			const id = chosen[row]!;
			if (endIds.includes(id)) return false;
			continued[sequence]!.push(id);
			const goesOn = options.onToken?.(sequence, id) ?? true;
			return goesOn && continued[sequence]!.length < most;
		});
	};
	const began = performance.now();
	active = take(active, fill(model, prompts, lengths, cache, ranks));
	const filled = performance.now();
	let steps = 0;
	using step = new StepInput(model, cache, prompts.ids.length);
	const shifts = positionShifts(prompts);
	// A rank whose sequences are finished still runs the model, with the other ranks of its experts.
	while (ranks.group.exchange(Int32Array.of(active.length)).some(([count]) => count! > 0)) {
		steps += active.length;
		const input = step.of(
			active.map((sequence) => ({
				sequence,
				id: continued[sequence]!.at(-1)!,
				length: prompts.ids[sequence]!.length + continued[sequence]!.length - 1,
				shift: shifts[sequence]!,
			})),
		);
		const logits = passThrough(model, input.forward, input.rows, active.length, ranks);
		active = take(active, logits);
	}
	const tokens = prompts.ids.slice(0, numbers.length).reduce((sum, { length }) => sum + length, 0);
	return {
		ids: continued,
		times: {
			prefill: { tokens, seconds: (filled - began) / 1000 },
			decode: { tokens: steps, seconds: (performance.now() - filled) / 1000 },
		},
	};
}

/**
 * By how much the position of a sequence's next token differs from the number of tokens before it: on multimodal axes text goes on
 * behind a picture's largest row or column, however many rows the picture has (rope_deltas of transformers).
 */
function positionShifts({ ids, positions }: Prompts): number[] {
	if (positions === undefined) return ids.map(() => 0);
	const tokens = ids.reduce((sum, { length }) => sum + length, 0);
	let begin = 0;
	return ids.map(({ length }) => {
		begin += length;
		let largest = -1;
		for (let axis = 0; axis < positions.length; axis += tokens) {
			for (let at = axis + begin - length; at < axis + begin; at++) largest = Math.max(largest, positions[at]!);
		}
		return largest + 1 - length;
	});
}

/**
 * Lengths of the prompts and of spare sequences, as many as tensor-parallel ranks. The first one is padding where those need
 * equal runs of the prompts' tokens; the others are empty. Steps are filled up with them.
 */
function withSpares(lengths: readonly number[], ranks: number): number[] {
	const tokens = lengths.reduce((sum, length) => sum + length, 0);
	const padding = tokens === 0 ? ranks : (ranks - (tokens % ranks)) % ranks;
	return [...lengths, padding, ...new Array<number>(ranks - 1).fill(0)];
}

/** Logits on the host, a row a sequence. */
interface Logits {
	row(index: number): Float32Array;
}

/** The pass over the prompts. */
function fill(
	model: HybridModel,
	{ ids: sequences, rows, imageTokenId, positions }: Prompts,
	lengths: readonly number[],
	cache: DecodingCache,
	ranks: DecodingRanks,
): Logits | null {
	const { device, parallel } = model;
	const tokens = lengths.reduce((sum, length) => sum + length, 0);
	const ids = new Int32Array(tokens);
	const rowOfToken = new Int32Array(tokens).fill(-1);
	const last: number[] = [];
	let [at, row] = [0, 0];
	for (const own of sequences) {
		for (const id of own) {
			const isImage = id === imageTokenId && rows !== null;
			// No vocabulary has it: it embeds as zeros.
			ids[at] = isImage ? -1 : id;
			if (isImage) rowOfToken[at] = row++;
			at++;
		}
		last.push(at - 1);
	}
	const tape = new Tape(device, { recording: false });
	const text = { ids, labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths };
	// Spare sequences take any position.
	const axes = positions && { positions: widened(positions, at, tokens) };
	using input = new DeviceInput(device, { ...text, ...axes }, parallel);
	using owned = new DisposableStack();
	const own = <O extends Disposable>(one: O) => owned.use(one);
	const matrices =
		rows === null ? [] : [own(placement(device, { ids, rowOfToken, placesPerSample: [rows.rows] }, parallel.tokens))];
	using wanted = new SparseMatrix(device, pickRows(last.length > 0 ? last : [0], tokens));
	using filling = cache.fill(lengths);
	const forward: ForwardInput = {
		...input.forward(0, TokenSlice.of(0, tokens)),
		...placingRows(tape, rows === null ? [] : [rows], { matrices, ranks: parallel.tokens, config: model.config, own }),
		mixing: (layer) => filling.of(layer),
		wanted,
	};
	return passThrough(model, forward, tokens, sequences.length, ranks);
}

/** Rows of `from` values as rows of `to`, the new ones zero. */
function widened(values: Int32Array, from: number, to: number): Int32Array {
	const wide = new Int32Array((values.length / from) * to);
	for (let row = 0; row * from < values.length; row++)
		wide.set(values.subarray(row * from, (row + 1) * from), row * to);
	return wide;
}

/** This rank's model chunks, from the ids to the logits of the first `wanted` rows; null on a stage without a head. */
function passThrough(
	model: HybridModel,
	forward: ForwardInput,
	tokens: number,
	wanted: number,
	{ stages, edges }: DecodingRanks,
): Logits | null {
	const { device, parallel, config } = model;
	const tape = new Tape(device, { recording: false });
	let logits: Logits | null = null;
	for (const [virtual, chunk] of model.chunks.entries()) {
		const index = virtual * stages.size + stages.rank;
		const entered =
			index === 0 ? null : edges.get(index)!.receiveForward([tokens / parallel.tp.size], { returns: false });
		using hidden = entered?.rows ?? null;
		using result = chunk.forward(tape, forward, hidden);
		if (!chunk.segment.hasHead) {
			edges.get(index + 1)!.sendForward({ rows: result, rowsPerSample: [] }, { returns: false });
			continue;
		}
		using whole = gatherColumns(tape, result, parallel.tp);
		using first = whole.rowsFrom(0, wanted);
		const values = wanted === 0 ? new Float32Array(0) : first.toFloat32();
		const { width } = whole;
		logits = { row: (row) => values.subarray(row * width, row * width + config.vocabularySize) };
	}
	for (const [chunk, edge] of edges) if (chunk > 0) edge.settle();
	return logits;
}

// Model input of a step of decoding: a token of each of some sequences, and where the cache has those before.

/** The newest token of a sequence. */
interface NewToken {
	/** Its number in the cache. */
	readonly sequence: number;
	readonly id: number;
	/** Tokens before it. */
	readonly length: number;
	/** Its position less `length`. */
	readonly shift: number;
}

/** Buffers of steps of one number of tokens. */
interface Buffers extends Disposable {
	/** ids, slots, firstRows, lengths and positions, i32 [5, tokens]. */
	readonly all: Tensor;
	readonly sequences: Sequences;
	readonly localSequences: Sequences;
	readonly localPositions: Tensor;
	readonly parts: readonly [ids: Tensor, slots: Tensor, firstRows: Tensor, lengths: Tensor, positions: Tensor];
}

/** Bounds of lengths are multiples of this: steps ask for the same calls again and again, and CUDA graphs repeat. */
const lengthUnit = 256;

export class StepInput implements Disposable {
	readonly #buffers = new Map<number, Buffers>();

	/** `firstSpare`: the cache's sequences from there on, as many as tensor-parallel ranks, are padding. */
	constructor(
		readonly model: HybridModel,
		readonly cache: DecodingCache,
		private readonly firstSpare: number,
	) {}

	/**
	 * The input of a step over these tokens. Tensor-parallel ranks need equal parts of the rows, at least one each: spare
	 * sequences fill them up. It is valid until the next one is asked for.
	 */
	of(tokens: readonly NewToken[]): { readonly forward: ForwardInput; readonly rows: number } {
		const { tp } = this.model.parallel;
		const rows = Math.max(1, Math.ceil(tokens.length / tp.size)) * tp.size;
		const spares = Array.from({ length: rows - tokens.length }, (_, index) => ({
			sequence: this.firstSpare + index,
			...{ id: 0, length: 0, shift: 0 },
		}));
		const all = [...tokens, ...spares];
		const buffers = this.#of(rows);
		const { device } = this.model;
		device.copyToDevice(
			buffers.all,
			Int32Array.from([
				...all.map(({ id }) => id),
				...all.map(({ sequence }) => sequence),
				...all.map(({ sequence }) => this.cache.firstRows[sequence]!),
				...all.map(({ length }) => length),
				...all.map(({ length, shift }) => length + shift),
			]),
		);
		const [ids, slots, firstRows, lengths, positions] = buffers.parts;
		const longest = Math.max(...all.map(({ length }) => length));
		const maxLength = Math.ceil((longest + 1) / lengthUnit) * lengthUnit - 1;
		const places = { slots, firstRows, lengths, positions, maxLength };
		const slice = TokenSlice.of(0, rows);
		return {
			rows,
			forward: {
				ids,
				sequences: buffers.sequences,
				localSequences: buffers.localSequences,
				localPositions: () => buffers.localPositions,
				dropoutKey: 0,
				tokens: slice,
				localTokens: slice.cut(tp),
				mixing: (layer) => this.cache.step(layer, places),
			},
		};
	}

	#of(rows: number): Buffers {
		const found = this.#buffers.get(rows);
		if (found) return found;
		const { device, parallel } = this.model;
		const all = Tensor.empty(device, [5, rows], "i32", "data");
		const sequences = Sequences.batch(device, rows, 1);
		const localSequences = Sequences.batch(device, rows / parallel.tp.size, 1);
		const part = (row: number) => {
			using own = all.rowsFrom(row, 1);
			return own.view([rows]);
		};
		const parts = [part(0), part(1), part(2), part(3), part(4)] as const;
		const { first, count } = TokenSlice.of(0, rows).cut(parallel.tp);
		using positions = parts[3].view([rows, 1]);
		using own = positions.rowsFrom(first, count);
		const localPositions = own.view([count]);
		const made: Buffers = {
			all,
			sequences,
			localSequences,
			localPositions,
			parts,
			[Symbol.dispose]: () => {
				for (const owned of [all, sequences, localSequences, localPositions, ...parts]) owned[Symbol.dispose]();
			},
		};
		this.#buffers.set(rows, made);
		return made;
	}

	[Symbol.dispose](): void {
		for (const buffers of this.#buffers.values()) buffers[Symbol.dispose]();
	}
}
