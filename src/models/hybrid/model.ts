/** One rank's part of the hybrid language model: the parameters of its stages, its routers, and the stages themselves. */
import type { Device } from "../../native/device.ts";
import { type ModelParallel, noModelParallel, placeOf } from "../../parallel/model-parallel.ts";
import type { BucketSize, ParameterSet } from "../../parallel/parameter-set.ts";
import { type LogicalTensor, ModuleParameters } from "../module-parameters.ts";
import { configOfLayer, type HybridConfig } from "./config.ts";
import { ExpertOverflow } from "./expert-overflow.ts";
import type { LayerProbe } from "./layer-context.ts";
import { layersOfSegment } from "./layer-numbering.ts";
import { isAdapterName } from "./lora.ts";
import { hybridParameters } from "./names.ts";
import { RouterState } from "./router-state.ts";
import { type Segment, wholeModel } from "./segments.ts";
import { HybridStage } from "./stage.ts";

export class HybridModel implements Disposable {
	readonly #parameters: ModuleParameters;
	/** Default: this process alone. */
	readonly parallel: ModelParallel;
	/** Begin of the names of every MoE layer of this rank, by layer index. */
	readonly #routerPrefixes: ReadonlyMap<number, string>;
	/** State of the router of every MoE layer that is here, by layer index. */
	readonly routers: ReadonlyMap<number, RouterState>;
	/** null: every expert is here. */
	readonly #overflow: ExpertOverflow | null;
	/** Measures the layers of every pass from now on; null: nothing does. */
	probe: LayerProbe | null = null;
	/** In the order of the layers. */
	readonly stages: readonly HybridStage[];

	constructor(
		readonly device: Device,
		readonly config: HybridConfig,
		options: {
			readonly frozen: boolean;
			readonly parallel?: ModelParallel;
			/** Runs of layers that are here, ascending; default: all of them. */
			readonly segments?: readonly Segment[];
			/** Replicas of dense and of expert parameters; default one. */
			readonly replicas?: { readonly dense: number; readonly expert: number };
			/** Buckets of gradients for reduction; default: gradients are not cut. */
			readonly buckets?: BucketSize;
		},
	) {
		this.parallel = options.parallel ?? noModelParallel("language", 0);
		const segments = options.segments ?? [wholeModel(config.pattern.length)];
		this.#parameters = new ModuleParameters(device, hybridParameters(config, segments), placeOf(this.parallel), {
			dtype: config.dtype,
			frozen: ({ name }) => options.frozen || (config.lora !== null && !isAdapterName(name)),
			...(options.replicas ? { replicas: options.replicas } : {}),
			...(options.buckets ? { buckets: options.buckets } : {}),
		});
		const routed = segments
			.flatMap((segment) => layersOfSegment(config, segment))
			.filter(({ symbol }) => symbol === "E");
		this.#routerPrefixes = new Map(routed.map(({ index, prefix }) => [index, prefix]));
		this.routers = new Map(
			routed.map(({ index }) => {
				const passes = config.prediction?.repeated && index >= config.pattern.length ? config.prediction.depths : 1;
				return [
					index,
					new RouterState(device, configOfLayer(config, index).moe, { tokenShards: this.parallel.tp.size, passes }),
				];
			}),
		);
		const { experts } = this.parallel;
		this.#overflow = experts && new ExpertOverflow(device, experts, this.routers);
		const parts = {
			config,
			parallel: this.parallel,
			parameter: (name: string) => this.parameters.get(name),
			routers: this.routers,
			vocabularyStart: this.vocabularyShard.start,
			probe: () => this.probe,
		};
		this.stages = segments.map((segment) => new HybridStage(segment, parts));
	}

	get parameters(): ParameterSet {
		return this.#parameters.set;
	}

	/** Draws initial values from `seed`. */
	initialise(seed: number): void {
		this.#parameters.initialise(seed);
	}

	/** This rank's part of every tensor of the model, buffers included. */
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

	/** A UserError when experts of this rank were sent more rows than they have room for since the last call; waits for the device. */
	requireRoomForRows(): void {
		this.#overflow?.check();
	}

	/** First row of this rank's part of the vocabulary, and the number of its rows without padding. */
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
	}
}
