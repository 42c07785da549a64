/**
 * This rank's part of a training's tensors: parameters in flat buffers, their optimizer state, and tensors outside of buffers
 * (the routers' expert biases). Data-parallel replicas divide a part into equal slices, those of ZeRO-1, and each writes its own,
 * so every byte is written once.
 */
import { isAdapterName } from "../../models/lora.ts";
import type { LogicalTensor } from "../../models/module-parameters.ts";
import type { Optimizer, OptimizerShard, StateName } from "../../optim/optimizer.ts";
import {
	type DataParallel,
	exchangeTexts,
	type Group,
	type ParameterBuffer,
	type ShardBlock,
} from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { dtypeBytes, type Tensor } from "../../tensor/index.ts";
import type { Box } from "../chunks.ts";
import { compareTensors, requireMatch } from "../mapping.ts";
import type { TensorStore, TensorType } from "../store.ts";

/** A flat buffer of parameters and its content. */
export interface StoredBuffer {
	readonly buffer: ParameterBuffer;
	/** null: frozen, or no optimizer was asked for. */
	readonly shard: OptimizerShard | null;
	readonly parts: readonly LocalPart[];
	/** Elements that this rank writes; begin === end where another rank does. */
	readonly begin: number;
	readonly end: number;
}

/** A replicated tensor of its own, fp32. */
export interface LooseTensor {
	readonly name: string;
	readonly shape: readonly number[];
	readonly value: Tensor;
}

/** Tensors that are loaded together. */
export interface StoredTensors {
	readonly buffers: readonly StoredBuffer[];
	readonly loose: readonly LooseTensor[];
}

/** Every tensor that this rank holds a part of, with its whole shape; without the optimizer's unless `optimizer`. */
function shapesOf({ buffers, loose }: StoredTensors, optimizer: boolean): Map<string, readonly number[]> {
	const shapes = new Map<string, readonly number[]>(loose.map(({ name, shape }) => [name, shape]));
	for (const { parts, shard } of buffers) {
		for (const { name, shape } of parts) {
			shapes.set(name, shape);
			if (!optimizer || shard === null) continue;
			for (const state of ["param", ...shard.states.keys()] as const) shapes.set(optimizerName(state, name), shape);
		}
	}
	return shapes;
}

export interface TrainedModules {
	readonly replicas: readonly DataParallel[];
	/** This rank's part of every tensor of those modules; the receiver disposes values and gradients. */
	logicalTensors(): Iterable<LogicalTensor>;
	/** null: weights alone are saved and loaded. */
	readonly optimizer: Optimizer | null;
	/** Whether this rank writes the tensors outside of buffers: one rank of a module does. */
	readonly writesLoose: boolean;
}

export class TrainingTensors implements Disposable {
	readonly buffers: readonly StoredBuffer[];
	readonly loose: readonly LooseTensor[];
	readonly writesLoose: boolean;

	constructor({ replicas, logicalTensors, optimizer, writesLoose }: TrainedModules) {
		const all = replicas.flatMap((replica) => replica.parameters.buffers.map((buffer) => ({ replica, buffer })));
		const parts = new Map<ParameterBuffer, LocalPart[]>(all.map(({ buffer }) => [buffer, []]));
		const loose: LooseTensor[] = [];
		for (const { name, shape, value, gradient, blocks } of logicalTensors()) {
			gradient?.[Symbol.dispose]();
			const home = all.find(({ buffer }) => buffer.values.allocation === value.allocation)?.buffer;
			if (home) {
				const offset = (value.byteOffset - home.values.byteOffset) / dtypeBytes[value.dtype];
				parts.get(home)!.push({ name, shape, offset, width: value.width, blocks });
				value[Symbol.dispose]();
			} else loose.push({ name, shape, value });
		}
		this.loose = loose;
		this.writesLoose = writesLoose;
		this.buffers = all.map(({ replica, buffer }) => ({
			buffer,
			shard: optimizer?.shards.find((shard) => shard.buffer === buffer) ?? null,
			parts: parts.get(buffer)!.sort((a, b) => a.offset - b.offset),
			...writtenRange(replica, buffer),
		}));
	}

	/** The tensors that a checkpoint has: low-rank adapters and an elastic model's router train in buffers of their own. */
	of(checkpoint: { readonly adapters: boolean; readonly router: boolean }): StoredTensors {
		const lacking = (name: string) =>
			(!checkpoint.adapters && isAdapterName(name)) || (!checkpoint.router && name.startsWith("elastic_router."));
		const buffers = this.buffers.filter(({ parts }) => !parts.some(({ name }) => lacking(name)));
		return { buffers, loose: this.loose };
	}

	/** Bytes that this rank writes of them. */
	writtenBytes(optimizer: boolean): number {
		const buffers = this.buffers.map(({ buffer, shard, begin, end }) => {
			const states = optimizer && shard !== null ? (1 + shard.states.size) * dtypeBytes.f32 : 0;
			return (end - begin) * (dtypeBytes[buffer.dtype] + states);
		});
		const loose = this.writesLoose ? this.loose.map(({ value }) => value.elements * dtypeBytes.f32) : [];
		return [...buffers, ...loose].reduce((sum, bytes) => sum + bytes, 0);
	}

	[Symbol.dispose](): void {
		for (const { value } of this.loose) value[Symbol.dispose]();
	}
}

/**
 * This rank's slice among the replicas; empty for tensors that other ranks hold too, except on the rank that counts
 * them.
 */
function writtenRange(replica: DataParallel, buffer: ParameterBuffer): { begin: number; end: number } {
	const others = (buffer.kind.replicated && !replica.countsReplicated) || buffer.kind.copy === "uncounted";
	if (others) return { begin: 0, end: 0 };
	const { rank, size } = replica.groupOf(buffer);
	const cut = (part: number) => Math.floor((part * buffer.elements) / size);
	return { begin: cut(rank), end: cut(rank + 1) };
}

// Strict keys (docs/spec/checkpoint.md §6): the tensors that all ranks want together are exactly those of the
// checkpoint.

/**
 * Throws the same UserError on every rank of `world` unless the checkpoint holds exactly the tensors of all ranks;
 * without `optimizer` its optimizer state is not looked at. Every rank calls this together.
 */
export function requireTensors(tensors: StoredTensors, store: TensorStore, optimizer: boolean, world: Group): void {
	const own = JSON.stringify([...shapesOf(tensors, optimizer)]);
	const wanted = new Map<string, readonly number[]>(
		exchangeTexts(world, own).flatMap((text) => JSON.parse(text) as [string, number[]][]),
	);
	const there = new Map<string, TensorType>();
	for (const [name, { dtype, shape }] of store.tensors) {
		if (!optimizer && isOptimizerName(name)) continue;
		const expected = wanted.get(name);
		const padded = expected !== undefined && isPadded(name, shape, expected);
		there.set(name, { dtype, shape: padded ? expected : shape });
	}
	const found = compareTensors(there, wanted);
	const { missing, unexpected, misshaped } = found;
	const [first] = [...missing, ...unexpected];
	if (first !== undefined && misshaped.length === 0 && [...missing, ...unexpected].every(isOptimizerName)) {
		throw new UserError(
			`${store.path} was saved by a training of other parts (--freeze-lm, --freeze-vit, --freeze-projection): of its optimizer ${missing.length} tensors are missing and ${unexpected.length} too many, such as ${first}; --no-load-optim goes on with a new one.`,
		);
	}
	requireMatch(store.path, found);
}

/** A checkpoint may hold more rows of a vocabulary than there are tokens. */
function isPadded(name: string, stored: readonly number[], wanted: readonly number[]): boolean {
	const vocabulary = name.replace(/^optimizer\.state\.[a-z_]+\./, "");
	const rest = (shape: readonly number[]) => shape.slice(1).join();
	return isVocabulary(vocabulary) && rest(stored) === rest(wanted) && stored[0]! > wanted[0]!;
}

// Names of optimizer tensors in a checkpoint (docs/spec/checkpoint.md §8.3).

type StoredState = "param" | StateName;

/** fp32, of the weight's logical shape. */
export function optimizerName(state: StoredState, name: string): string {
	return `optimizer.state.${state}.${name}`;
}

export function isOptimizerName(name: string): boolean {
	return name.startsWith("optimizer.");
}

/** Whether a tensor has a row a token, padded perhaps with rows that mean nothing (docs/spec/checkpoint.md §6.3). */
function isVocabulary(name: string): boolean {
	return /(^|\.)(embedding\.word_embeddings|output_layer)\.weight$/.test(name);
}

// Describes a stretch of a flat parameter buffer as boxes of the logical tensors in it, each one run of the buffer.
// Saving and loading both walk these, so a cut of the buffers (tensor, expert or data parallelism, ZeRO slices) only
// decides which rank holds which boxes of the same logical tensors.

/** A logical tensor's part on this rank. */
export interface LocalPart {
	readonly name: string;
	/** Shape of the whole tensor. */
	readonly shape: readonly number[];
	/** First element in the buffer; rows of `width` elements follow. */
	readonly offset: number;
	readonly width: number;
	/** Its rectangles in the whole tensor, seen as [shape[0], rest]. */
	readonly blocks: readonly ShardBlock[];
}

/** A box of a logical tensor whose values are elements [position, position + elements) of the buffer. */
export interface Piece extends Box {
	readonly name: string;
	readonly shape: readonly number[];
	readonly position: number;
	readonly elements: number;
}

/** The boxes of a part that lie in elements [begin, end) of the buffer, in buffer order. */
export function piecesOf(part: LocalPart, begin: number, end: number): Piece[] {
	const { name, shape, offset, width } = part;
	const fullWidth = shape.slice(1).reduce((product, size) => product * size, 1);
	return part.blocks.flatMap((block) => {
		const cut = block.columns !== fullWidth;
		if (block.localColumn !== 0 || block.columns !== width || (cut && shape.length !== 2)) {
			throw new RangeError(
				`${name}: a rank's part of [${shape}] is not a list of whole rows, nor columns of a matrix.`,
			);
		}
		const first = offset + block.localRow * width;
		const [from, to] = [Math.max(begin, first) - first, Math.min(end, first + block.rows * width) - first];
		if (from >= to) return [];
		const local = cut ? [block.rows, width] : [block.rows, ...shape.slice(1)];
		let position = first + from;
		return boxesOfRange(local, from, to).map(({ offsets, sizes }) => {
			const elements = sizes.reduce((product, size) => product * size, 1);
			const whole = offsets.map((value, axis) => value + ([block.fullRow, cut ? block.fullColumn : 0][axis] ?? 0));
			const piece = { name, shape, offsets: whole, sizes, position, elements };
			position += elements;
			return piece;
		});
	});
}

/** Elements of a buffer that stand elsewhere in another order of it. */
export interface Move {
	readonly from: number;
	readonly to: number;
	readonly elements: number;
}

/**
 * The boxes of a part in elements [begin, end) of the buffer, in the order of the tensor and as few as can be, and how the
 * elements have to be moved for that, which stay in the same stretch: rows that a rank holds in turns
 * (docs/spec/moe-performance.md §1.5) would be a box a turn.
 */
export function arrangedPieces(part: LocalPart, begin: number, end: number): { pieces: Piece[]; moves: Move[] } {
	const pieces = piecesOf(part, begin, end);
	const before = (a: Piece, b: Piece) => a.offsets[0]! - b.offsets[0]! || a.position - b.position;
	if (pieces.every((piece, at) => at === 0 || before(pieces[at - 1]!, piece) <= 0)) return { pieces, moves: [] };
	const moves: Move[] = [];
	const arranged: Piece[] = [];
	let position = pieces[0]!.position;
	for (const piece of pieces.toSorted(before)) {
		moves.push({ from: piece.position, to: position, elements: piece.elements });
		const last = arranged.at(-1);
		if (last && follows(last, piece)) {
			const sizes = [last.sizes[0]! + piece.sizes[0]!, ...last.sizes.slice(1)];
			arranged[arranged.length - 1] = { ...last, sizes, elements: last.elements + piece.elements };
		} else arranged.push({ ...piece, position });
		position += piece.elements;
	}
	return { pieces: arranged, moves };
}

/** Whether a box begins where another ends, both being rows of the same columns. */
function follows(first: Piece, second: Piece): boolean {
	return (
		first.offsets[0]! + first.sizes[0]! === second.offsets[0] &&
		first.offsets.slice(1).join() === second.offsets.slice(1).join() &&
		first.sizes.slice(1).join() === second.sizes.slice(1).join()
	);
}

/** Elements [from, to) of a dense tensor, not empty, as boxes in order: the end of a row, whole rows, the start of one. */
export function boxesOfRange(shape: readonly number[], from: number, to: number): Box[] {
	const [, ...rest] = shape;
	if (rest.length === 0) return [{ offsets: [from], sizes: [to - from] }];
	const stride = rest.reduce((product, size) => product * size, 1);
	const row = Math.floor(from / stride);
	const below = (box: Box, at: number): Box => ({ offsets: [at, ...box.offsets], sizes: [1, ...box.sizes] });
	const boxes: Box[] = [];
	let at = from;
	if (from % stride !== 0) {
		at = Math.min(to, (row + 1) * stride);
		boxes.push(...boxesOfRange(rest, from - row * stride, at - row * stride).map((box) => below(box, row)));
	}
	const [begin, end] = [at / stride, Math.floor(to / stride)];
	if (end > begin) boxes.push({ offsets: [begin, ...rest.map(() => 0)], sizes: [end - begin, ...rest] });
	const tail = Math.max(at, end * stride);
	if (tail < to)
		boxes.push(...boxesOfRange(rest, tail - end * stride, to - end * stride).map((box) => below(box, end)));
	return boxes;
}
