/**
 * The whole layout of a run: the module grids, which ranks form a lane, and the routes between encoder and language
 * model lanes (spec runtime 1.3, 2.1, 2.2).
 */

import { dataLanes, hasEncoder, sharesOneProcess } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { Grid, type GridShape } from "./grid.ts";

/** One side of a layout string: no pipeline. */
export type SideLayout = Omit<GridShape, "pipeline">;

/** Encoder lane `source` and language lane `destination` exchange rows. */
export interface Route {
	readonly source: number;
	readonly destination: number;
}

export class Topology {
	/** Throws a RangeError unless the grids follow each other from rank 0 and their lanes can be joined. */
	constructor(
		/** null: the language model alone, or both modules in one process (`colocated`). */
		readonly encoder: Grid | null,
		readonly language: Grid,
		/** Both modules live on the language grid's one rank. */
		readonly colocated: boolean,
	) {
		const end = encoder?.size ?? 0;
		if ((encoder?.offset ?? 0) !== 0 || language.offset !== end) {
			throw new RangeError(`The language grid starts at rank ${language.offset}, the encoder's ends at ${end}.`);
		}
		if (encoder && !lanesNest(encoder.lanes, language.lanes)) {
			throw new RangeError(`${encoder.lanes} encoder lanes do not match ${language.lanes} language lanes.`);
		}
		if (colocated && (encoder !== null || language.size !== 1)) {
			throw new RangeError(`Both modules in one process, but the language grid has ${language.size} ranks.`);
		}
	}

	get worldSize(): number {
		return (this.encoder?.size ?? 0) + this.language.size;
	}

	/** Name of the module a rank runs. */
	moduleOf(rank: number): string {
		return this.gridOf(rank).name;
	}

	gridOf(rank: number): Grid {
		if (this.encoder?.contains(rank)) return this.encoder;
		if (this.language.contains(rank)) return this.language;
		throw new RangeError(`Rank ${rank} belongs to no grid.`);
	}

	/** What people call a rank: its module and its place there, such as "tp 0 dp 1 ep 0". */
	describe(rank: number): { readonly module: string; readonly coordinates: string } {
		const grid = this.gridOf(rank);
		const at = grid.coordinates(rank);
		const { pipeline, expert, expertTensor } = grid.shape;
		const parts = [
			`tp ${at.tp}`,
			`dp ${at.dp}`,
			...(pipeline > 1 ? [`pp ${at.pp}`] : []),
			...(expert > 1 ? [`ep ${at.ep}`] : []),
			...(expertTensor > 1 ? [`expt_tp ${at.expt_tp}`] : []),
		];
		return { module: grid.name, coordinates: parts.join(" ") };
	}

	/** Routes in destination order; several sources of one destination in row order. */
	get routes(): Route[] {
		if (!this.encoder) return [];
		const [sources, destinations] = [this.encoder.lanes, this.language.lanes];
		const fanOut = destinations >= sources;
		const factor = fanOut ? destinations / sources : sources / destinations;
		return Array.from({ length: Math.max(sources, destinations) }, (_, index) =>
			fanOut
				? { source: Math.floor(index / factor), destination: index }
				: { source: index, destination: Math.floor(index / factor) },
		);
	}

	/** The encoder rank that sends a lane's rows: the highest tensor-parallel rank of its last stage. */
	sourceLeader(lane: number): number {
		return this.sourceLane(lane).at(-1)!;
	}

	/** The language rank that receives a lane's rows: tensor-parallel rank 0 of the first stage. */
	destinationLeader(lane: number): number {
		return this.destinationLane(lane)[0]!;
	}

	/** Ranks of an encoder lane that hold what it sends, ascending. */
	sourceLane(lane: number): number[] {
		return this.encoder!.lane(lane, this.encoder!.shape.pipeline - 1);
	}

	/** Ranks of a language lane that receive rows, ascending. */
	destinationLane(lane: number): number[] {
		return this.language.lane(lane, 0);
	}

	/** All leaders, ascending: the members of the bridge's group. */
	get leaders(): number[] {
		if (!this.encoder) return [];
		const sources = Array.from({ length: this.encoder.lanes }, (_, lane) => this.sourceLeader(lane));
		const destinations = Array.from({ length: this.language.lanes }, (_, lane) => this.destinationLeader(lane));
		return [...sources, ...destinations].sort((a, b) => a - b);
	}
}

/** Whether each lane of one side can serve the same number of lanes of the other. */
export function lanesNest(sources: number, destinations: number): boolean {
	return sources % destinations === 0 || destinations % sources === 0;
}

/** Builds the grids side by side: encoder first. `encoder` null: no encoder, or both modules in one process. */
export function layOut(encoder: SideLayout | null, language: SideLayout, colocated: boolean, stages = 1): Topology {
	const encoderGrid = encoder && new Grid("radio_encoder", 0, { ...encoder, pipeline: 1 });
	const languageGrid = new Grid("language", encoderGrid?.size ?? 0, { ...language, pipeline: stages });
	return new Topology(encoderGrid, languageGrid, colocated);
}

/**
 * The layout that a configuration, checked as all are, asks for. Weight shards count as data parallelism: lane d·G + g
 * of Megatron is data-parallel rank d·G + g here (spec runtime 1.5).
 */
export function topologyOf(c: TrainingConfiguration): Topology {
	const colocated = sharesOneProcess(c);
	const encoder =
		hasEncoder(c) && !colocated ? { tensor: c.encoderTp, data: c.encoderDp, expert: 1, expertTensor: 1 } : null;
	const language = { tensor: c.llmTp, data: dataLanes(c), expert: c.llmEp, expertTensor: c.llmExptTp };
	return layOut(encoder, language, colocated, c.llmPp);
}
