/**
 * This rank's part of a training's tensors: parameters in flat buffers, their optimizer state, and tensors outside of buffers
 * (the routers' expert biases). Data-parallel replicas divide a part into equal slices, those of ZeRO-1, and each writes its own,
 * so every byte is written once.
 */
import { isAdapterName } from "../../models/lora.ts";
import type { LogicalTensor } from "../../models/module-parameters.ts";
import type { AdamW, OptimizerShard } from "../../optim/adamw.ts";
import type { DataParallel, ParameterBuffer } from "../../parallel/index.ts";
import { dtypeBytes, type Tensor } from "../../tensor/index.ts";
import type { LocalPart } from "./buffer-boxes.ts";
import { optimizerName, optimizerStates } from "./names.ts";

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
export function shapesOf({ buffers, loose }: StoredTensors, optimizer: boolean): Map<string, readonly number[]> {
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
