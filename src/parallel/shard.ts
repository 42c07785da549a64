/** How a parameter is sharded over a tensor-parallel group, and which part a rank holds. */

/** The sharding of a parameter, as its model declares it. */
export type Shard =
	| { readonly kind: "replicated" }
	/**
	 * Each rank holds an equal part of `dimension`. With `blocks` (sizes along it) it holds an equal part of each block, one
	 * after the other, as of Mamba's in_proj. With `interleave` its parts of the equally long blocks alternate every `interleave`
	 * rows, as gate and linear halves do (docs/spec/moe-performance.md §1.5).
	 */
	| {
			readonly kind: "split";
			readonly dimension: 0 | 1;
			readonly blocks?: readonly number[];
			readonly interleave?: number;
	  };

/** A rank's position in the group over which a parameter is sharded. */
export interface ShardPlace {
	readonly rank: number;
	readonly size: number;
}

/** A rectangle of a rank's tensor and its place in the whole tensor, both seen as [rows, columns]. */
export interface ShardBlock {
	readonly localRow: number;
	readonly fullRow: number;
	readonly rows: number;
	readonly localColumn: number;
	readonly fullColumn: number;
	readonly columns: number;
}

/** Shape of a rank's shard. Throws if a size does not divide. */
export function localShape(shape: readonly number[], shard: Shard, size: number, name: string): number[] {
	const local = [...shape];
	if (shard.kind === "replicated" || size === 1) return local;
	for (const length of shard.blocks ?? [shape[shard.dimension]!]) {
		if (length % size !== 0) throw new RangeError(`${name}: ${length} cannot be cut into ${size} equal parts.`);
	}
	local[shard.dimension] = shape[shard.dimension]! / size;
	return local;
}

/** The rectangles of a rank's shard. Rows from `liveRows` on are vocabulary padding and in no rectangle. */
export function shardBlocks(
	shape: readonly number[],
	shard: Shard,
	{ rank, size }: ShardPlace,
	liveRows = shape[0]!,
): ShardBlock[] {
	const width = shape.slice(1).reduce((product, length) => product * length, 1);
	const plain = shard.kind === "replicated" || (size === 1 && (shard.interleave ?? 0) === 0);
	if (plain) return clip([whole(shape[0]!, width)], liveRows);
	if (shard.dimension === 1) {
		const columns = width / size;
		return clip([{ ...whole(shape[0]!, columns), fullColumn: rank * columns }], liveRows);
	}
	let start = 0;
	const blocks = (shard.blocks ?? [shape[0]!]).map((length) => {
		const rows = length / size;
		const block = { ...whole(rows, width), localRow: start / size, fullRow: start + rank * rows };
		start += length;
		return block;
	});
	return clip(shard.interleave ? interleaved(blocks, shard.interleave) : blocks, liveRows);
}

/** Splits the blocks into alternating runs of `turn` rows, in the order in which they lie on the rank. */
function interleaved(blocks: readonly ShardBlock[], turn: number): ShardBlock[] {
	const { rows } = blocks[0]!;
	if (rows % turn !== 0) throw new RangeError(`${rows} rows cannot lie in turns of ${turn}.`);
	return Array.from({ length: rows / turn }, (_, at) =>
		blocks.map((block, index) => ({
			...block,
			localRow: (at * blocks.length + index) * turn,
			fullRow: block.fullRow + at * turn,
			rows: turn,
		})),
	).flat();
}

function whole(rows: number, columns: number): ShardBlock {
	return { localRow: 0, fullRow: 0, rows, localColumn: 0, fullColumn: 0, columns };
}

function clip(blocks: readonly ShardBlock[], liveRows: number): ShardBlock[] {
	return blocks
		.map((block) => ({ ...block, rows: Math.min(block.rows, liveRows - block.fullRow) }))
		.filter(({ rows }) => rows > 0);
}
