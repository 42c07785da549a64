/** The interface of a kind of layers, and the parameter specifications that kinds share. */
import type { PerLayerSize } from "../../../config/per-layer.ts";
import type { TrainingConfiguration } from "../../../config/schema.ts";
import type { Shard } from "../../../parallel/index.ts";
import type { ResidualSum, Tape, Tensor } from "../../../tensor/index.ts";
import type { Initialisation, ParameterSpec } from "../../parameter-spec.ts";
import type { HybridConfig, LayerDifference } from "../config.ts";
import type { LayerContext } from "../layer-context.ts";
import type { Nodes } from "../nodes.ts";

/** A kind of layers. Adding a kind: docs/add-a-layer-kind.md. */
export interface Kind {
	/** Its name in messages. */
	readonly title: string;
	/** First parts of the names of a layer's parameters, in any version of Megatron; no two kinds of a group share the first. */
	readonly scopes: readonly string[];
	/** Whether its layers have a router, and a RouterState in LayerContext.router. */
	readonly routes: boolean;
	/** A layer's parameters in forward order, by the ends of their names. `config`: that of the layer. */
	readonly parameters: (config: HybridConfig) => ParameterSpec[];
	/** End of the name of a norm's weight, where the model has a norm behind such layers (`postNorms`); absent: a layer has none. */
	readonly postNorm?: string;
	/** x_(T/tp)H → the layer's branch [T/tp, H], without the residual. Nodes: where another microbatch's may run. */
	readonly forward: (tape: Tape, context: LayerContext, x: ResidualSum) => Tensor | Nodes<Tensor>;
	/** Forward FLOPs of a token; a multiply-add counts 2. */
	readonly flops: (c: TrainingConfiguration) => number;
	/** Forward FLOPs of `tokens` tokens by Megatron's formula (docs/spec/runtime.md §6.5). */
	readonly megatronFlops: (c: TrainingConfiguration, tokens: number) => number;
	/** The sizes that a layer may have of its own (config/per-layer.ts), from the configuration of the layer. */
	readonly ownSizes: (c: LayerSizes) => LayerDifference;
}

type LayerSizes = Pick<TrainingConfiguration, PerLayerSize["size"] | "windowSize">;

export const replicated: Shard = { kind: "replicated" };
export const rows: Shard = { kind: "split", dimension: 0 };
export const columns: Shard = { kind: "split", dimension: 1 };
export const ones: Initialisation = { kind: "constant", value: 1 };
export const zeros: Initialisation = { kind: "constant", value: 0 };

/** The weight of a norm, replicated, whose gain is 1 at first. */
export function normWeight({ zeroCentredNorms }: HybridConfig, name: string, width: number): ParameterSpec {
	return { name, shape: [width], initialisation: zeroCentredNorms ? zeros : ones, shard: replicated };
}

/** The parameters of a norm of hidden states: its weight `name`, and LayerNorm's bias. */
export function hiddenNorm(config: HybridConfig, name: string): ParameterSpec[] {
	const weight = normWeight(config, name, config.hiddenSize);
	if (config.normalization === "RMSNorm") return [weight];
	return [weight, { ...weight, name: normBias(name), initialisation: zeros }];
}

/** The parameters of the norm behind a layer, if the model has such norms. */
export function postNorm(config: HybridConfig, name: string): ParameterSpec[] {
	return config.postNorms ? hiddenNorm(config, name) : [];
}

/** Name of a norm's bias by its weight's. */
export function normBias(weight: string): string {
	return weight.replace(/weight$/, "bias");
}

/**
 * Initialisations of inner projections and of those into the residual stream, which are smaller: σ0 / sqrt(layers)
 * (docs/spec/language-model.md §6.1).
 */
export function distributions(config: HybridConfig): { inward: Initialisation; outward: Initialisation } {
	const std = config.initMethodStd;
	return {
		inward: { kind: "normal", standardDeviation: std },
		outward: { kind: "normal", standardDeviation: std / Math.sqrt(config.pattern.length) },
	};
}

/** The bias of a projection, if the model has it. */
export function biases(config: HybridConfig, name: string, width: number, shard: Shard): ParameterSpec[] {
	if (!hasBias(config, name.replace(/bias$/, "weight"))) return [];
	const initialisation = config.biases.start === "drawn" ? distributions(config).inward : zeros;
	return [{ name, shape: [width], initialisation, shard }];
}

/** Whether the projection of this weight has a bias; those of Megatron's Mamba-2 and Gated DeltaNet layers, and to and from latents have none. */
export function hasBias({ biases }: HybridConfig, weight: string): boolean {
	if (biases.of === "qkv") return weight.endsWith("linear_qkv.weight");
	if (biases.of === "attention") return /self_attention\.linear_(qkv|proj)\.weight$/.test(weight);
	return biases.of === "all" && !/\.((in|out)_proj|linear_(q|kv)_.*)\.weight$/.test(weight);
}
