/**
 * The layout of a run: modules, each on a grid of ranks, and the edges between them (docs/spec/runtime.md §1.3, §2.1, §2.2).
 * Module grids are disjoint, one after the other, or equal (colocated).
 */

import { dataLanes, hasEncoder, sharesRanks } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { type EdgeLayout, lanesNest, type Route, ranksOf, routesBetween } from "./edge-layout.ts";
import { Grid, type GridShape } from "./grid.ts";

/** One side of a layout string. */
export type SideLayout = GridShape;

export class Topology {
	/** Throws a RangeError unless the grids are disjoint and consecutive from rank 0, or equal, and their lanes nest. */
	constructor(
		/** null: no encoder. */
		readonly encoder: Grid | null,
		readonly language: Grid,
	) {
		const end = encoder?.size ?? 0;
		if (this.colocated && encoder!.size !== language.size) {
			throw new RangeError(`Both modules start at one rank, but have ${encoder!.size} and ${language.size} ranks.`);
		}
		if ((encoder?.offset ?? 0) !== 0 || (language.offset !== end && !this.colocated)) {
			throw new RangeError(`The language grid starts at rank ${language.offset}, the encoder's ends at ${end}.`);
		}
		if (encoder && !lanesNest(encoder.lanes, language.lanes)) {
			throw new RangeError(`${encoder.lanes} encoder lanes do not match ${language.lanes} language lanes.`);
		}
	}

	/** Grids in the order in which a microbatch passes the modules. */
	get modules(): readonly Grid[] {
		return this.encoder ? [this.encoder, this.language] : [this.language];
	}

	/** Whether both modules are on the same ranks. */
	get colocated(): boolean {
		return this.encoder !== null && this.encoder.offset === this.language.offset;
	}

	get worldSize(): number {
		return this.language.offset + this.language.size;
	}

	/** Modules that a rank runs. */
	modulesOf(rank: number): readonly Grid[] {
		return this.modules.filter((grid) => grid.contains(rank));
	}

	/** Names of the modules that a rank runs. */
	moduleOf(rank: number): string {
		return this.modulesOf(rank)
			.map(({ name }) => name)
			.join("+");
	}

	/** The grid of the last module of a rank: the language model's if the rank is in it. */
	gridOf(rank: number): Grid {
		const grid = this.modulesOf(rank).at(-1);
		if (!grid) throw new RangeError(`Rank ${rank} belongs to no grid.`);
		return grid;
	}

	/** A rank's modules and its coordinates in the last of them, for messages: "tp 0 dp 1 ep 0". */
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
		return { module: this.moduleOf(rank), coordinates: parts.join(" ") };
	}

	/** Routes from encoder lanes to language lanes, in destination order, several sources of a destination in row order. */
	get routes(): Route[] {
		if (!this.encoder) return [];
		return routesBetween(this.encoder.lanes, this.language.lanes);
	}

	/** The edge from the encoder into the language model's first stage; null without an encoder. */
	get imageEdge(): EdgeLayout | null {
		const { encoder, language } = this;
		if (encoder === null) return null;
		const lanes = (grid: Grid, stage: number) =>
			Array.from({ length: grid.lanes }, (_, lane) => grid.lane(lane, stage));
		return { from: lanes(encoder, encoder.shape.pipeline - 1), to: lanes(language, 0) };
	}

	/** Ranks of the image edge, ascending. */
	get imageRanks(): number[] {
		return this.imageEdge === null ? [] : ranksOf(this.imageEdge);
	}

	/** The edge from a stage of the language model to the next; from the last stage to the first for interleaved schedules. */
	stageEdge(stage: number): EdgeLayout {
		const { language } = this;
		const next = (stage + 1) % language.shape.pipeline;
		const lanes = Array.from({ length: language.lanes }, (_, lane) => lane);
		return {
			from: lanes.map((lane) => language.lane(lane, stage)),
			to: lanes.map((lane) => language.lane(lane, next)),
		};
	}
}

/**
 * Builds a topology: encoder first and language model after it, or both from rank 0 (`colocated`). `encoder` null: no encoder.
 */
export function layOut(encoder: SideLayout | null, language: SideLayout, colocated = false): Topology {
	const encoderGrid = encoder && new Grid("radio_encoder", 0, encoder);
	return new Topology(encoderGrid, new Grid("language", colocated ? 0 : (encoderGrid?.size ?? 0), language));
}

/**
 * The topology of a checked configuration. Weight shards (gtp) count as data parallelism: Megatron's lane d·G + g is
 * data-parallel rank d·G + g here (docs/spec/runtime.md §1.5).
 */
export function topologyOf(c: TrainingConfiguration): Topology {
	const encoder = hasEncoder(c)
		? { tensor: c.encoderTp, data: c.encoderDp, pipeline: 1, expert: 1, expertTensor: 1 }
		: null;
	const language = {
		tensor: c.llmTp,
		data: dataLanes(c),
		pipeline: c.llmPp,
		expert: c.llmEp,
		expertTensor: c.llmExptTp,
	};
	return layOut(encoder, language, sharesRanks(c));
}
