/** Builds the masks of one microbatch from its sampled submodel (docs/spec/elastic.md §9, §10). */
import type { LayerMasks, ModelMasks, NormMask } from "../../../models/language/masks.ts";
import type { HybridModel } from "../../../models/language/model.ts";
import type { ColumnMask, ScaleMask, ScoreMask } from "../../../tensor/index.ts";
import { type Axis, type AxisName, layerKind, parentSize } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";
import type { RouterSample } from "../router/network.ts";
import type { FactorLayout, PartName, PartPlace } from "./rings.ts";
import type { TableLayout, TablePurpose } from "./tables.ts";

/** Bias of an expert that is left out: no score reaches it. */
const blockedBias = -1e30;
/** Megatron's is 0. Beside this the next to nothing of their scores is lost: the first of them is chosen. */
const equalBias = 1e-10;

interface Parts {
	readonly config: ElasticConfig;
	readonly model: HybridModel;
	readonly tables: TableLayout;
	readonly layout: FactorLayout;
	readonly sample: RouterSample;
}

/** Device memory of a microbatch's mask factors and their gradients. */
export interface MaskMemory {
	readonly columns: (place: PartPlace) => ColumnMask;
	readonly scale: (place: PartPlace) => ScaleMask;
}

export class MaskBuilder {
	readonly #columns = new Map<PartPlace, ColumnMask>();
	readonly #scales = new Map<PartPlace, ScaleMask>();

	constructor(
		private readonly parts: Parts,
		private readonly memory: MaskMemory,
	) {}

	masks(): ModelMasks {
		const { config, model } = this.parts;
		const emb = this.#axis("emb");
		const layers = new Map<number, LayerMasks>();
		for (const { segment } of model.chunks)
			for (let index = segment.begin; index < segment.end; index++) layers.set(index, this.#layer(index));
		return {
			hidden: emb && this.#mask(emb, 0, "prefix", "hidden"),
			norm: emb && this.#norm(emb, 0, "hidden"),
			masksEmbedding: !config.compat,
			layer: (index) => layers.get(index)!,
		};
	}

	#layer(index: number): LayerMasks {
		const { config, model } = this.parts;
		const kind = model.config.pattern[index]!;
		return {
			mamba: kind === "mamba" ? this.#mamba(index) : null,
			attention: kind === "attention" ? this.#attention(index) : null,
			moe: kind === "moe" ? this.#moe(index) : null,
			// In Megatron the choice of layers is read by the budget alone.
			keep: config.ranking.includes(index) && !config.compat ? this.#keep(config.ranking.indexOf(index)) : null,
		};
	}

	#mamba(index: number): LayerMasks["mamba"] {
		const axis = this.#axis("mamba");
		if (axis === null) return null;
		const row = this.#row(axis, index);
		return {
			gate: this.#mask(axis, row, "prefix", "gate"),
			step: this.#mask(axis, row, "prefix", "step"),
			convolution: {
				weight: this.#mask(axis, row, "square", "convolution"),
				bias: this.#mask(axis, row, "prefix", "bias"),
			},
			norm: this.#norm(axis, row, "inner"),
		};
	}

	#attention(index: number): LayerMasks["attention"] {
		const axis = this.#axis("head");
		if (axis === null) return null;
		const row = this.#row(axis, index);
		return {
			projection: this.#mask(axis, row, "prefix", "projection"),
			attended: this.#mask(axis, row, "prefix", "attended"),
		};
	}

	#moe(index: number): LayerMasks["moe"] {
		const { config, tables, sample } = this.parts;
		const experts = this.#axis("moe_expert");
		const channels = this.#axis("mlp");
		const emb = this.#axis("emb");
		const columns = channels && this.#mask(channels, this.#row(channels, index), "prefix", "channels");
		const scale = emb && !config.softMask ? this.#scale(emb, 0, "one", "channels") : null;
		return {
			scores: experts && this.#scores(experts, this.#row(experts, index)),
			shares: experts && tables.expertShares(sample, this.#row(experts, index)),
			channels: columns || scale ? { columns, scale } : null,
		};
	}

	/**
	 * Megatron leaves experts that are masked with bias 0, so that they can be chosen. Without soft masks it blocks samples of
	 * a microbatch by the experts' numbers; there are hardly ever as many samples as experts, so nothing is blocked.
	 */
	#scores(experts: Axis, row: number): ScoreMask {
		const { config } = this.parts;
		const ofBias = config.compat ? this.#mask(experts, row, "prefix", "experts") : null;
		const common = { sigmoid: config.softMask, blockedBias: config.compat ? equalBias : blockedBias, ofBias };
		const unmasked = config.compat && !config.softMask;
		return { ...this.#mask(experts, row, unmasked ? "one" : "scores", "experts"), ...common };
	}

	/** An axis with a choice; null: the parent's size alone. */
	#axis(name: AxisName): Axis | null {
		const axis = this.parts.config.axes.find((one) => one.name === name);
		return axis !== undefined && axis.sizes.length > 1 ? axis : null;
	}

	#row({ name, layers }: Axis, index: number): number {
		if (layers === null) return 0;
		const row = layers.indexOf(index);
		if (row < 0) throw new RangeError(`Axis ${name} has no choice of layer ${index} (${layerKind[name]}).`);
		return row;
	}

	#norm(axis: Axis, row: number, part: PartName): NormMask {
		const { tables, model, sample } = this.parts;
		return {
			epsilonFactor: tables.epsilonFactor(sample, axis.name, row, parentSize(model.config, axis.name)),
			scale: this.#scale(axis, row, "norm", part),
		};
	}

	#keep(place: number): ScaleMask {
		return once(this.#scales, this.parts.layout.get("skip_layer", place, "keep", "hidden"), this.memory.scale);
	}

	#scale({ name }: Axis, row: number, purpose: TablePurpose, part: PartName): ScaleMask {
		return once(this.#scales, this.parts.layout.get(name, row, purpose, part), this.memory.scale);
	}

	#mask({ name }: Axis, row: number, purpose: TablePurpose, part: PartName): ColumnMask {
		return once(this.#columns, this.parts.layout.get(name, row, purpose, part), this.memory.columns);
	}
}

function once<Key, Value>(made: Map<Key, Value>, key: Key, make: (key: Key) => Value): Value {
	const before = made.get(key);
	if (before !== undefined) return before;
	const value = make(key);
	made.set(key, value);
	return value;
}
