/**
 * The layout of a run: modules, each on a grid of ranks, and the edges between them (docs/spec/runtime.md §1.3, §2.1, §2.2).
 * Grids are disjoint, one after the other; an encoder's may instead equal the language model's (colocated).
 */

import { dataLanes, hasEncoder, sharesRanks } from "../config/derive.ts";
import { modulesOf } from "../config/modules.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { type EdgeLayout, lanesNest, type Route, routesBetween } from "./edge-layout.ts";
import { Grid, type GridShape } from "./grid.ts";

/** Names of the modules that Megatron's flags describe. */
export const [visionModule, languageModule] = ["radio_encoder", "language"];

/** One side of a layout string. */
export type SideLayout = GridShape;

/** An edge from the last stage of an encoder into the first of the language model. */
export interface FeatureEdge {
	readonly encoder: Grid;
	readonly layout: EdgeLayout;
	/** Routes from encoder lanes to language lanes, in destination order, several sources of a destination in row order. */
	readonly routes: readonly Route[];
}

export class Topology {
	/**
	 * Throws a RangeError unless every encoder's grid equals the language model's (colocated) or follows the one before, the first at
	 * rank 0, the language model follows them, and lanes nest.
	 */
	constructor(
		/** In the order in which their rows enter the language model. */
		readonly encoders: readonly Grid[],
		readonly language: Grid,
	) {
		let end = 0;
		for (const encoder of encoders) {
			const shared = this.shares(encoder);
			if (shared && encoder.size !== language.size) {
				const sizes = `${encoder.size} and ${language.size} ranks`;
				throw new RangeError(`${encoder.name} and ${language.name} start at one rank, but have ${sizes}.`);
			}
			if (shared && encoder.shape.pipeline > 1) {
				throw new RangeError(`${encoder.name} has pipeline stages on the ranks of ${language.name}.`);
			}
			if (!shared && encoder.offset !== end) {
				throw new RangeError(
					`The ${encoder.name} grid starts at rank ${encoder.offset}, the one before ends at ${end}.`,
				);
			}
			if (!lanesNest(encoder.lanes, language.lanes)) {
				throw new RangeError(
					`${encoder.lanes} lanes of ${encoder.name} do not match ${language.lanes} language lanes.`,
				);
			}
			if (!shared) end += encoder.size;
		}
		if (language.offset !== end) {
			throw new RangeError(`The language grid starts at rank ${language.offset}, the encoders' end at ${end}.`);
		}
	}

	/** Grids in the order in which a microbatch passes the modules. */
	get modules(): readonly Grid[] {
		return [...this.encoders, this.language];
	}

	/** Whether an encoder is on the language model's ranks. */
	shares(encoder: Grid): boolean {
		return encoder.offset === this.language.offset;
	}

	/** Whether all modules are on the same ranks, and there are several. */
	get colocated(): boolean {
		return this.encoders.length > 0 && this.encoders.every((encoder) => this.shares(encoder));
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
			...(grid.context > 1 ? [`cp ${at.cp}`] : []),
			`dp ${at.dp}`,
			...(pipeline > 1 ? [`pp ${at.pp}`] : []),
			...(expert > 1 ? [`ep ${at.ep}`] : []),
			...(expertTensor > 1 ? [`expt_tp ${at.expt_tp}`] : []),
		];
		return { module: this.moduleOf(rank), coordinates: parts.join(" ") };
	}

	/** One for each encoder. */
	get featureEdges(): FeatureEdge[] {
		const { language } = this;
		return this.encoders.map((encoder) => ({
			encoder,
			layout: { from: encoder.lanesOf(encoder.shape.pipeline - 1), to: language.lanesOf(0) },
			routes: routesBetween(encoder.lanes, language.lanes),
		}));
	}
}

/** An encoder's name and layout, and whether it is on the language model's ranks. */
export interface EncoderLayout {
	readonly name: string;
	readonly shape: SideLayout;
	readonly colocated: boolean;
}

/** Builds a topology: encoders one after the other, and the language model after those that are not on its ranks. */
export function layOut(encoders: readonly EncoderLayout[], language: SideLayout): Topology {
	const sizeOf = ({ shape: { tensor, data, pipeline } }: EncoderLayout) => tensor * data * pipeline;
	const end = encoders.reduce((sum, encoder) => (encoder.colocated ? sum : sum + sizeOf(encoder)), 0);
	let next = 0;
	const grids = encoders.map((encoder) => {
		const offset = encoder.colocated ? end : next;
		if (!encoder.colocated) next += sizeOf(encoder);
		return new Grid(encoder.name, offset, encoder.shape);
	});
	return new Topology(grids, new Grid(languageModule, end, language));
}

/**
 * The topology of a checked configuration. Weight shards (gtp) count as data parallelism: Megatron's lane d·G + g is
 * data-parallel rank d·G + g here (docs/spec/runtime.md §1.5).
 */
export function topologyOf(c: TrainingConfiguration): Topology {
	const shape = { tensor: c.encoderTp, data: c.encoderDp, pipeline: c.encoderPp, expert: 1, expertTensor: 1 };
	const language = {
		tensor: c.llmTp,
		context: c.llmCp,
		data: dataLanes(c),
		pipeline: c.llmPp,
		expert: c.llmEp,
		expertTensor: c.llmExptTp,
	};
	const vision = hasEncoder(c) ? [{ name: visionModule, shape, colocated: sharesRanks(c) }] : [];
	const others = modulesOf(c).map(({ name, tp, dp, ranks }) => ({
		name,
		shape: { ...shape, tensor: tp, data: dp, pipeline: 1 },
		colocated: ranks === "language",
	}));
	return layOut([...vision, ...others], language);
}
