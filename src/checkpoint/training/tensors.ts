/**
 * This rank's part of a training's tensors: parameters in flat buffers, their optimizer state, and tensors outside of buffers
 * (the routers' expert biases). Data-parallel replicas divide a part into equal slices, those of ZeRO-1, and each writes its own,
 * so every byte is written once.
 */
import { isAdapterName } from "../../models/lora.ts";
import type { LogicalTensor } from "../../models/module-parameters.ts";
import type { AdamW, OptimizerShard } from "../../optim/adamw.ts";
import { type DataParallel, exchangeTexts, type Group, type ParameterBuffer } from "../../parallel/index.ts";
import { dtypeBytes, type Tensor } from "../../tensor/index.ts";
import { compareTensors, requireMatch } from "../mapping.ts";
import type { TensorStore, TensorType } from "../store.ts";
import type { LocalPart } from "./buffer-boxes.ts";

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
			for (const state of optimizerStates) shapes.set(optimizerName(state, name), shape);
		}
	}
	return shapes;
}

export interface TrainedModules {
	readonly replicas: readonly DataParallel[];
	/** This rank's part of every tensor of those modules; the receiver disposes values and gradients. */
	logicalTensors(): Iterable<LogicalTensor>;
	/** null: weights alone are saved and loaded. */
	readonly optimizer: AdamW | null;
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
			const states = optimizer && shard !== null ? optimizerStates.length * dtypeBytes.f32 : 0;
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
	requireMatch(store.path, compareTensors(there, wanted));
}

/** A checkpoint may hold more rows of a vocabulary than there are tokens. */
function isPadded(name: string, stored: readonly number[], wanted: readonly number[]): boolean {
	const vocabulary = name.replace(/^optimizer\.state\.[a-z_]+\./, "");
	const rest = (shape: readonly number[]) => shape.slice(1).join();
	return isVocabulary(vocabulary) && rest(stored) === rest(wanted) && stored[0]! > wanted[0]!;
}

// Names of optimizer tensors in a checkpoint (docs/spec/checkpoint.md §8.3).

export const optimizerStates = ["param", "exp_avg", "exp_avg_sq"] as const;
type OptimizerStateName = (typeof optimizerStates)[number];

/** fp32, of the weight's logical shape. */
export function optimizerName(state: OptimizerStateName, name: string): string {
	return `optimizer.state.${state}.${name}`;
}

export function isOptimizerName(name: string): boolean {
	return name.startsWith("optimizer.");
}

/** Whether a tensor has a row a token, padded perhaps with rows that mean nothing (docs/spec/checkpoint.md §6.3). */
function isVocabulary(name: string): boolean {
	return /(^|\.)(embedding\.word_embeddings|output_layer)\.weight$/.test(name);
}
