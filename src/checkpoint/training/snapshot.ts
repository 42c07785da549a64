/** A copy of what this rank writes, in host memory that another thread reads while training changes the originals. */
import { dtypeBytes, type Tensor } from "../../tensor/tensor.ts";
import type { DtypeTag } from "../dtype.ts";
import type { SnapshotEntry } from "../native/save-thread.ts";
import { optimizerName } from "./names.ts";
import { type LocalPart, piecesOf } from "./pieces.ts";
import type { StoredBuffer, TrainingTensors } from "./tensors.ts";

const tags = { f32: "F32", bf16: "BF16" } as const satisfies Record<string, DtypeTag>;

/** Host memory that one snapshot after the other uses: allocated at the first. */
export class SnapshotMemory {
	readonly #blocks: SharedArrayBuffer[] = [];
	#used = 0;

	/** Everything given out before is free again. */
	reset(): void {
		this.#used = 0;
	}

	/** A block of at least `bytes`. */
	take(bytes: number): SharedArrayBuffer {
		const at = this.#used++;
		const known = this.#blocks[at];
		if (known && known.byteLength >= bytes) return known;
		this.#blocks[at] = new SharedArrayBuffer(bytes);
		return this.#blocks[at];
	}

	/** Bytes held. */
	get bytes(): number {
		return this.#blocks.reduce((sum, { byteLength }) => sum + byteLength, 0);
	}
}

/** Copies this rank's share; the entries are valid until `memory` is reset. */
export function takeSnapshot(
	tensors: TrainingTensors,
	memory: SnapshotMemory,
	withOptimizer: boolean,
): SnapshotEntry[] {
	memory.reset();
	const entries = tensors.buffers.flatMap((stored) => snapshotOf(stored, memory, withOptimizer));
	if (!tensors.writesLoose) return entries;
	for (const { name, shape, value } of tensors.loose) {
		const sizes = [...shape];
		const offsets = shape.map(() => 0);
		entries.push({ name, dtype: "F32", shape, offsets, sizes, memory: copyOf(value, memory), byteOffset: 0 });
	}
	return entries;
}

function snapshotOf(
	{ buffer, shard, parts, begin, end }: StoredBuffer,
	memory: SnapshotMemory,
	withOptimizer: boolean,
): SnapshotEntry[] {
	if (begin === end) return [];
	const copyRange = (flat: Tensor, first: number) => {
		using range = flat.columns(begin - first, end - begin);
		return copyOf(range, memory);
	};
	const values = copyRange(buffer.values, 0);
	const tag = tags[buffer.dtype];
	const entries = entriesOf(parts, begin, end, { dtype: tag, memory: values, nameOf: (name) => name });
	if (shard === null || !withOptimizer) return entries;
	// Weights in fp32 are their own masters.
	const master = buffer.dtype === "f32" ? values : copyRange(shard.master, shard.begin);
	const states = [
		["param", master],
		["exp_avg", copyRange(shard.expAvg, shard.begin)],
		["exp_avg_sq", copyRange(shard.expAvgSq, shard.begin)],
	] as const;
	for (const [state, copy] of states) {
		const nameOf = (name: string) => optimizerName(state, name);
		entries.push(...entriesOf(parts, begin, end, { dtype: "F32", memory: copy, nameOf }));
	}
	return entries;
}

function entriesOf(
	parts: readonly LocalPart[],
	begin: number,
	end: number,
	copy: {
		readonly dtype: "F32" | "BF16";
		readonly memory: SharedArrayBuffer;
		readonly nameOf: (name: string) => string;
	},
): SnapshotEntry[] {
	const bytes = copy.dtype === "F32" ? 4 : 2;
	return parts.flatMap((part) =>
		piecesOf(part, begin, end).map(({ name, shape, offsets, sizes, position }) => ({
			name: copy.nameOf(name),
			dtype: copy.dtype,
			shape,
			offsets,
			sizes,
			memory: copy.memory,
			byteOffset: (position - begin) * bytes,
		})),
	);
}

function copyOf(tensor: Tensor, memory: SnapshotMemory): SharedArrayBuffer {
	const bytes = tensor.elements * dtypeBytes[tensor.dtype];
	const block = memory.take(bytes);
	tensor.device.copyToHost(new Uint8Array(block, 0, bytes), tensor);
	return block;
}
