/** One rank's part of the hybrid language model: parameters, routers and model chunks. */

import type { LayerKind } from "../../config/hybrid-pattern.ts";
import type { Device } from "../../native/device.ts";
import {
	type BucketSize,
	type ModelParallel,
	noModelParallel,
	type ParameterSet,
	placeOf,
} from "../../parallel/index.ts";
import { Tensor } from "../../tensor/index.ts";
import { isAdapterName } from "../lora.ts";
import type { Module } from "../module.ts";
import { type LogicalTensor, ModuleParameters } from "../module-parameters.ts";
import type { MatrixOptions } from "../parameter-spec.ts";
import { configOfLayer, type HybridConfig } from "./config.ts";
import { ExpertOverflow } from "./expert-overflow.ts";
import { kinds } from "./kinds/index.ts";
import type { LayerProbe } from "./layer-context.ts";
import { layersOfSegment } from "./layer-numbering.ts";
import { ModelChunk } from "./model-chunk.ts";
import { hybridParameters } from "./names.ts";
import { type PipelineSegment, wholeModel } from "./pipeline-segments.ts";
import { axisFrequencies, ropeFrequencies } from "./rope-frequencies.ts";
import { RouterState } from "./router-state.ts";

export class HybridModel implements Module {
	readonly #parameters: ModuleParameters;
	/** Default: no model parallelism. */
	readonly parallel: ModelParallel;
	/** Name prefix of each MoE layer on this rank, by layer index. */
	readonly #routerPrefixes: ReadonlyMap<number, string>;
	/** Router state of each MoE layer on this rank, by layer index. */
	readonly routers: ReadonlyMap<number, RouterState>;
	/** null: this rank holds all experts, so rows cannot overflow. */
	readonly #overflow: ExpertOverflow | null;
	/** Frequencies of rotary embeddings by the kind of layers, where they are no geometric series. */
	readonly #ropeFrequencies = new Map<LayerKind, Tensor>();
	/** Those of every axis of positions; empty: there is one. */
	readonly #axisFrequencies: Tensor[] = [];
	/** Observes the layers of every later pass; null: none. */
	probe: LayerProbe | null = null;
	/** The model chunks on this rank, in the order of layers. */
	readonly chunks: readonly ModelChunk[];

	constructor(
		readonly device: Device,
		readonly config: HybridConfig,
		options: {
			readonly frozen: boolean;
			readonly parallel?: ModelParallel;
			/** The pipeline segments of this rank's chunks, ascending; default: all layers. */
			readonly segments?: readonly PipelineSegment[];
			/** Data-parallel replicas of dense and of expert parameters; default 1. */
			readonly replicas?: { readonly dense: number; readonly expert: number };
			/** Gradient buckets; default: one buffer for each kind. */
			readonly buckets?: BucketSize;
			/** How Muon reads weights as matrices; null or absent: AdamW updates all of them. */
			readonly matrices?: MatrixOptions | null;
		},
	) {
		this.parallel = options.parallel ?? noModelParallel("language", 0);
		const segments = options.segments ?? [wholeModel(config.pattern.length)];
		this.#parameters = new ModuleParameters(device, hybridParameters(config, segments), placeOf(this.parallel), {
			...options,
			dtype: config.dtype,
			frozen: ({ name }) => options.frozen || (config.lora !== null && !isAdapterName(name)),
		});
		const routed = segments
			.flatMap((segment) => layersOfSegment(config, segment))
			.filter(({ kind }) => kinds[kind].routes);
		this.#routerPrefixes = new Map(routed.map(({ index, prefix }) => [index, prefix]));
		this.routers = new Map(
			routed.map(({ index }) => {
				const passes = config.mtp?.repeated && index >= config.pattern.length ? config.mtp.depths : 1;
				return [
					index,
					new RouterState(device, configOfLayer(config, index).moe, { tokenShards: this.parallel.tokens.size, passes }),
				];
			}),
		);
		const { experts } = this.parallel;
		this.#overflow = experts && new ExpertOverflow(device, experts, this.routers);
		const { attention, latent } = config;
		for (const [kind, rope, columns] of [
			["attention", attention.rope, attention.headDim],
			["latentAttention", latent?.rope, latent?.positionDim],
		] as const) {
			if (!rope?.scaling) continue;
			this.#ropeFrequencies.set(kind, Tensor.from(device, ropeFrequencies(rope, columns!)));
		}
		const { mropeSection: sections, mropeInterleaved: interleaved } = attention;
		if (sections !== null && attention.rope !== null) {
			const axes = axisFrequencies(attention.rope, attention.headDim, { sections, interleaved });
			this.#axisFrequencies.push(...axes.map((frequencies) => Tensor.from(device, frequencies)));
		}
		const parts = {
			config,
			parallel: this.parallel,
			parameter: (name: string) => this.parameters.get(name),
			routers: this.routers,
			ropeFrequencies: this.#ropeFrequencies,
			axisFrequencies: this.#axisFrequencies,
			vocabularyStart: this.vocabularyShard.start,
			probe: () => this.probe,
		};
		this.chunks = segments.map((segment) => new ModelChunk(segment, parts));
	}

	get parameters(): ParameterSet {
		return this.#parameters.set;
	}

	/** Draws initial values of parameters from `seed`, and sets expert biases to zero. */
	initialise(seed: number): void {
		this.#parameters.initialise(seed);
		for (const { device, expertBias } of this.routers.values()) device.setZero(expertBias, expertBias.bytes);
	}

	/** This rank's part of every tensor of the model, buffers included. The caller disposes them. */
	*logicalTensors(): Generator<LogicalTensor> {
		yield* this.#parameters.logicalTensors();
		if (!this.config.moe.expertBias) return;
		for (const [layer, { expertBias }] of this.routers) {
			const experts = expertBias.elements;
			const prefix = this.#routerPrefixes.get(layer)!;
			const block = { localRow: 0, fullRow: 0, rows: experts, localColumn: 0, fullColumn: 0, columns: 1 };
			yield {
				name: `${prefix}mlp.router.expert_bias`,
				shape: [experts],
				value: expertBias.view([experts, 1]),
				gradient: null,
				blocks: [block],
			};
		}
	}

	/**
	 * Throws a UserError if experts of this rank were sent more rows than they have room for since the last call; waits for the
	 * device.
	 */
	requireRoomForRows(): void {
		this.#overflow?.check();
	}

	/** This rank's vocabulary shard: its first row, and its number of rows without padding. */
	get vocabularyShard(): { readonly start: number; readonly live: number } {
		const { tp } = this.parallel;
		const rows = this.config.paddedVocabularySize / tp.size;
		const start = tp.rank * rows;
		return { start, live: Math.max(0, Math.min(rows, this.config.vocabularySize - start)) };
	}

	[Symbol.dispose](): void {
		this.#parameters[Symbol.dispose]();
		for (const router of this.routers.values()) router[Symbol.dispose]();
		this.#overflow?.[Symbol.dispose]();
		for (const frequencies of [...this.#ropeFrequencies.values(), ...this.#axisFrequencies]) {
			frequencies[Symbol.dispose]();
		}
	}
}
