/** The masks of one microbatch from its sample (docs/spec/elastic.md §9, §10). */
import type { LayerMasks, ModelMasks, NormMask } from "../models/hybrid/masks.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { ColumnMask, ScoreMask } from "../tensor/ops/mask-columns.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { type Axis, type AxisName, layerKind, parentSize } from "./axes.ts";
import type { ElasticConfig } from "./config.ts";
import type { DeviceRings } from "./rings.ts";
import type { RouterSample } from "./router-network.ts";
import type { Table, TableLayout } from "./tables.ts";

/** Bias of an expert that is left out: no score reaches it. */
const blockedBias = -1e30;
/** Megatron's is 0. Beside this the next to nothing of their scores is lost: the first of them is chosen. */
const equalBias = 1e-10;

interface Parts {
	readonly config: ElasticConfig;
	readonly model: HybridModel;
	readonly tables: TableLayout;
	readonly rings: DeviceRings;
	readonly sample: RouterSample;
}

/** Memory of a table's factors. */
type Factors = Pick<ColumnMask, "values" | "gradients">;

export class MaskBuilder {
	readonly #factors = new Map<Table, Factors>();

	constructor(
		private readonly parts: Parts,
		private readonly memory: (table: Table) => Factors,
	) {}

	masks(): ModelMasks {
		const { config, model } = this.parts;
		const emb = this.#axis("emb");
		const layers = new Map<number, LayerMasks>();
		for (const { segment } of model.stages)
			for (let index = segment.begin; index < segment.end; index++) layers.set(index, this.#layer(index));
		return {
			hidden: emb && this.#prefix(emb, 0, "columns"),
			norm: emb && this.#norm(emb, 0),
			masksEmbedding: !config.compat,
			layer: (index) => layers.get(index)!,
		};
	}

	#layer(index: number): LayerMasks {
		const { config, model } = this.parts;
		const symbol = model.config.pattern[index]!;
		const mamba = symbol === "M" ? this.#axis("mamba") : null;
		const head = symbol === "*" ? this.#axis("head") : null;
		return {
			mamba: mamba && {
				projection: this.#prefix(mamba, this.#row(mamba, index), "columns"),
				convolution: {
					weight: this.#prefix(mamba, this.#row(mamba, index), "third"),
					bias: this.#prefix(mamba, this.#row(mamba, index), "second"),
				},
				norm: this.#norm(mamba, this.#row(mamba, index)),
			},
			attention: head && {
				projection: this.#prefix(head, this.#row(head, index), "columns"),
				attended: this.#prefix(head, this.#row(head, index), "second"),
			},
			moe: symbol === "E" ? this.#moe(index) : null,
			// In Megatron the choice of layers is read by the budget alone.
			keep: config.ranking.includes(index) && !config.compat ? this.#keep(config.ranking.indexOf(index)) : null,
		};
	}

	#moe(index: number): LayerMasks["moe"] {
		const { config } = this.parts;
		const experts = this.#axis("moe_expert");
		const channels = this.#axis("mlp");
		const emb = this.#axis("emb");
		const ofHidden = emb && !config.softMask ? [this.#mask(this.parts.tables.get("emb", 0, "one"), null)] : [];
		return {
			scores: experts && this.#scores(experts, this.#row(experts, index)),
			channels: [...ofHidden, ...(channels ? [this.#prefix(channels, this.#row(channels, index), "columns")] : [])],
		};
	}

	/**
	 * Megatron leaves experts that are masked with bias 0, so that they can be chosen; without soft masks it blocks samples of
	 * a microbatch in their place, of which there are hardly ever as many, and so none of them.
	 */
	#scores(experts: Axis, row: number): ScoreMask {
		const { config, tables, rings: ofAxes } = this.parts;
		const rings = ofAxes.get("moe_expert").columns;
		const ofBias = config.compat ? this.#prefix(experts, row, "columns") : null;
		const common = { sigmoid: config.softMask, blockedBias: config.compat ? equalBias : blockedBias, ofBias };
		const unmasked = config.compat && !config.softMask;
		const mask = unmasked
			? this.#mask(tables.get("moe_expert", row, "one"), null)
			: this.#mask(tables.get("moe_expert", row, "scores"), rings);
		return { ...mask, ...common };
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

	#prefix({ name }: Axis, row: number, which: "columns" | "second" | "third"): ColumnMask {
		return this.#mask(this.parts.tables.get(name, row, "prefix"), this.parts.rings.get(name)[which]);
	}

	#norm({ name }: Axis, row: number): NormMask {
		const { tables, model, sample } = this.parts;
		return {
			epsilonFactor: tables.epsilonFactor(sample, name, row, parentSize(model.config, name)),
			scale: this.#mask(tables.get(name, row, "norm"), null),
		};
	}

	#keep(place: number): ColumnMask {
		return this.#mask(this.parts.tables.get("skip_layer", place, "keep"), null);
	}

	#mask(table: Table, rings: Tensor | null): ColumnMask {
		let factors = this.#factors.get(table);
		if (factors === undefined) {
			factors = this.memory(table);
			this.#factors.set(table, factors);
		}
		return { rings, ...factors };
	}
}
