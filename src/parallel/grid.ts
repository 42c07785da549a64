/**
 * A module's rank grid (docs/spec/runtime.md §1.1): two factorisations of the same span of global ranks. The first
 * dimension varies fastest.
 *   dense view:  rank = offset + tp + TP·(cp + CP·(dp + DP·pp))
 *   expert view: rank = offset + expt_tp + ETP·(ep + EP·(expt_dp + EDP·pp))
 * Weight shards (gtp in Megatron) run as extra data parallelism: the same lanes, counted in dp.
 */
import type { EdgeLayout } from "./edge-layout.ts";

/** Sizes of a grid's dimensions. */
export interface GridShape {
	readonly tensor: number;
	/** Ranks that hold runs of one microbatch's tokens; default 1. */
	readonly context?: number;
	readonly data: number;
	readonly pipeline: number;
	readonly expert: number;
	readonly expertTensor: number;
}

export type DenseDimension = "tp" | "cp" | "dp" | "pp";
export type ExpertDimension = "expt_tp" | "ep" | "expt_dp" | "pp";

/** Position of a rank in its grid. */
export interface Coordinates {
	readonly tp: number;
	readonly cp: number;
	readonly dp: number;
	readonly pp: number;
	readonly expt_tp: number;
	readonly ep: number;
	readonly expt_dp: number;
}

export class Grid {
	/** Context parallelism. */
	readonly context: number;
	/** Expert data parallelism: the ranks of the span divided by all other sizes. */
	readonly expertData: number;

	/** Throws a RangeError unless every size is positive and both views cover the same ranks. */
	constructor(
		readonly name: string,
		readonly offset: number,
		readonly shape: GridShape,
	) {
		const { tensor, context = 1, data, pipeline, expert, expertTensor } = shape;
		this.context = context;
		if (!Number.isSafeInteger(offset) || offset < 0) throw new RangeError(`${name} grid: offset is ${offset}.`);
		for (const [dimension, size] of Object.entries({ tensor, context, data, pipeline, expert, expertTensor })) {
			if (!Number.isSafeInteger(size) || size < 1) throw new RangeError(`${name} grid: ${dimension} is ${size}.`);
		}
		const [stage, expertRanks] = [tensor * context * data, expert * expertTensor];
		if (stage % expertRanks !== 0) {
			throw new RangeError(`${name} grid: ${expertRanks} ranks of an expert view do not divide ${stage}.`);
		}
		this.expertData = stage / expertRanks;
	}

	/** Ranks of the grid. */
	get size(): number {
		return this.shape.tensor * this.context * this.shape.data * this.shape.pipeline;
	}

	/** Global ranks, ascending. */
	get ranks(): number[] {
		return Array.from({ length: this.size }, (_, index) => this.offset + index);
	}

	/** Number of data lanes: microbatches that the module takes at a time. */
	get lanes(): number {
		return this.shape.data;
	}

	contains(rank: number): boolean {
		return rank >= this.offset && rank < this.offset + this.size;
	}

	coordinates(rank: number): Coordinates {
		if (!this.contains(rank)) throw new RangeError(`Rank ${rank} is not in the ${this.name} grid.`);
		const { tensor, data, expert, expertTensor } = this.shape;
		const index = rank - this.offset;
		const lane = tensor * this.context;
		const stage = lane * data;
		return {
			tp: index % tensor,
			cp: Math.floor(index / tensor) % this.context,
			dp: Math.floor(index / lane) % data,
			pp: Math.floor(index / stage),
			expt_tp: index % expertTensor,
			ep: Math.floor(index / expertTensor) % expert,
			expt_dp: Math.floor(index / (expertTensor * expert)) % this.expertData,
		};
	}

	/**
	 * The groups over a set of dimensions of one view: all ranks that agree on the view's other dimensions, each group
	 * ascending, groups ordered by their first rank.
	 */
	groups(view: "dense", varying: readonly DenseDimension[]): number[][];
	groups(view: "expert", varying: readonly ExpertDimension[]): number[][];
	groups(view: "dense" | "expert", varying: readonly string[]): number[][] {
		const dimensions =
			view === "dense" ? (["tp", "cp", "dp", "pp"] as const) : (["expt_tp", "ep", "expt_dp", "pp"] as const);
		const fixed = dimensions.filter((dimension) => !varying.includes(dimension));
		const byKey = Map.groupBy(this.ranks, (rank) => {
			const at = this.coordinates(rank);
			return fixed.map((dimension) => at[dimension]).join(",");
		});
		return [...byKey.values()];
	}

	/** Ranks of a lane in one pipeline stage, ascending. */
	lane(lane: number, stage: number): number[] {
		const length = this.shape.tensor * this.context;
		const first = this.offset + length * (lane + this.shape.data * stage);
		return Array.from({ length }, (_, index) => first + index);
	}

	/** Ranks of each lane in one pipeline stage. */
	lanesOf(stage: number): number[][] {
		return Array.from({ length: this.lanes }, (_, lane) => this.lane(lane, stage));
	}

	/** The edge from a pipeline stage to the next; from the last to the first for interleaved schedules. */
	stageEdge(stage: number): EdgeLayout {
		return { from: this.lanesOf(stage), to: this.lanesOf((stage + 1) % this.shape.pipeline) };
	}
}

/** The kinds of groups of a module's ranks (docs/spec/runtime.md §1.2). Context-parallel ranks are replicas, as those of dp are. */
const groupKinds = {
	tp: ["dense", ["tp"]],
	cp: ["dense", ["cp"]],
	tp_cp: ["dense", ["tp", "cp"]],
	dp: ["dense", ["cp", "dp"]],
	tp_dp: ["dense", ["tp", "cp", "dp"]],
	expt_dp: ["expert", ["expt_dp"]],
	expt_tp_dp: ["expert", ["expt_tp", "expt_dp"]],
	tp_ep: ["expert", ["expt_tp", "ep"]],
	pp: ["dense", ["pp"]],
	mp: ["dense", ["tp", "cp", "pp"]],
	module: ["dense", ["tp", "cp", "dp", "pp"]],
} as const;
export type GroupKind = keyof typeof groupKinds;

/** The kinds of groups in a grid; those over stages, parts of a context or an expert's tensor-parallel ranks only if there are several. */
export function kindsOf({ shape, context }: Grid): GroupKind[] {
	const absent = [...(shape.pipeline > 1 ? [] : ["pp"]), ...(shape.expertTensor > 1 ? [] : ["expt_tp"])];
	const varies = (kind: GroupKind) => groupKinds[kind][1] as readonly string[];
	return (Object.keys(groupKinds) as GroupKind[]).filter((kind) => {
		if (kind === "cp" || kind === "tp_cp") return context > 1;
		return kind === "tp_ep" || !varies(kind).some((dimension) => absent.includes(dimension));
	});
}

/** All groups of a kind in a grid. */
export function groupsOf(grid: Grid, kind: GroupKind): number[][] {
	const [view, varying] = groupKinds[kind];
	return view === "dense" ? grid.groups("dense", varying) : grid.groups("expert", varying);
}

/** The group of a kind that holds `rank`. */
export function groupWith(grid: Grid, kind: GroupKind, rank: number): number[] {
	const group = groupsOf(grid, kind).find((ranks) => ranks.includes(rank));
	if (!group) throw new RangeError(`Rank ${rank} is not in the ${grid.name} grid.`);
	return group;
}
