/**
 * Every parameter of the tower: Megatron's logical names, shapes, initial values and sharding
 * (docs/spec/vision.md §1.2).
 */
import type { Shard } from "../../parallel/index.ts";
import { wholeModel } from "../language/pipeline-segments.ts";
import { withAdapters } from "../lora.ts";
import type { Initialisation, ParameterSpec } from "../parameter-spec.ts";
import { patchWidth, type VitConfig } from "./config.ts";

/** Prefix of the tower in every name. */
export const vitPrefix = "modality_submodules.radio_encoder.encoders.radio_encoder.radio_model.";

const replicated: Shard = { kind: "replicated" };
const rows: Shard = { kind: "split", dimension: 0 };
const columns: Shard = { kind: "split", dimension: 1 };
const zeros: Initialisation = { kind: "constant", value: 0 };
const ones: Initialisation = { kind: "constant", value: 1 };

/** Prefix of layer `index`, from 0. */
export function vitLayerPrefix(index: number): string {
	return `${vitPrefix}decoder.layers.${index}.`;
}

function normal(standardDeviation: number): Initialisation {
	return { kind: "normal", standardDeviation };
}

/** All parameters of a segment in forward order; default: of all of the tower. */
export function vitParameters(config: VitConfig, segment = wholeModel(config.layers)): ParameterSpec[] {
	const specs = segment.embeds ? embeddingParameters(config) : [];
	for (let layer = segment.begin; layer < segment.end; layer++) {
		const layerSpecs = withAdapters(layerParameters(config), config.lora);
		specs.push(...layerSpecs.map((spec) => ({ ...spec, name: `decoder.layers.${layer}.${spec.name}` })));
	}
	if (segment.hasHead && config.finalLayerNorm) specs.push(...normParameters(config, "decoder.final_layernorm."));
	return specs.map((spec) => ({ ...spec, name: vitPrefix + spec.name }));
}

function embeddingParameters(config: VitConfig): ParameterSpec[] {
	const { hiddenSize: c, positionTable: table } = config;
	const specs: ParameterSpec[] = [
		{ name: "embedder.weight", shape: [c, patchWidth(config)], initialisation: normal(1), shard: rows },
		...(config.patchBias ? [{ name: "embedder.bias", shape: [c], initialisation: zeros, shard: rows }] : []),
	];
	if (config.patchNorm) specs.push(...normParameters(config, "embedder_norm."));
	if (config.positions.mode !== "none") {
		const shape = [1, table.rows * table.columns, c];
		specs.push({ name: "position_embeddings", shape, initialisation: normal(c ** -0.5), shard: replicated });
	}
	for (const [name, std] of classTokens(config)) {
		const shape = [config.classTokens, c];
		specs.push({ name, shape, initialisation: normal(std), shard: replicated, elementwise: true });
	}
	return specs;
}

/** The class tokens and their positions, as far as the tower has them, with the deviation of their initial values. */
function classTokens({ classTokens, classPositions, hiddenSize }: VitConfig): [name: string, std: number][] {
	if (classTokens === 0) return [];
	return [
		["class_token", 1],
		...(classPositions ? [["class_position_embeddings", hiddenSize ** -0.5] as [string, number]] : []),
	];
}

/** The factors of a half of a layer. */
function layerScale({ layerScale, hiddenSize }: VitConfig, name: string): ParameterSpec[] {
	if (layerScale === null) return [];
	return [{ name, shape: [hiddenSize], initialisation: { kind: "constant", value: layerScale }, shard: replicated }];
}

/** A norm of the tower's kind and width; `name`: up to "weight" or "bias". */
function normParameters({ normalization, hiddenSize }: VitConfig, name: string): ParameterSpec[] {
	const shape = [hiddenSize];
	return [
		{ name: `${name}weight`, shape, initialisation: ones, shard: replicated },
		...(normalization === "LayerNorm"
			? [{ name: `${name}bias`, shape, initialisation: zeros, shard: replicated } as const]
			: []),
	];
}

/** A projection and its bias; a bias of outputs that every rank completes is whole everywhere. */
function projection(
	name: string,
	shape: readonly [number, number],
	std: number,
	shard: Shard,
	biased: boolean,
): ParameterSpec[] {
	const bias: ParameterSpec = {
		...{ name: `${name}.bias`, shape: [shape[0]], initialisation: zeros },
		shard: shard === columns ? replicated : shard,
	};
	return [{ name: `${name}.weight`, shape, initialisation: normal(std), shard }, ...(biased ? [bias] : [])];
}

/** Names of the norms of queries and keys. */
export const qkNorms = ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] as const;

function layerParameters(config: VitConfig): ParameterSpec[] {
	const { hiddenSize: c, ffnHiddenSize: f, headDim, initMethodStd: inward, outputInitMethodStd: outward } = config;
	const attended = config.heads * headDim;
	const { linearBias: biased } = config;
	const norm = (linear: string) => normParameters(config, `${linear}.layer_norm_`);
	// The gate's half, then the linear one.
	const gated: Shard = { kind: "split", dimension: 0, blocks: [f, f] };
	const [first, shard] = config.activation === "swiglu" ? [2 * f, gated] : [f, rows];
	return [
		...norm("self_attention.linear_qkv"),
		...projection("self_attention.linear_qkv", [3 * attended, c], inward, rows, config.qkvBias).map((spec) => ({
			...spec,
			parts: [headDim, headDim, headDim],
		})),
		...(config.qkNorm ? qkNorms : []).map((name) => ({
			...{ name, shape: [attended], initialisation: ones, shard: replicated },
		})),
		...projection("self_attention.linear_proj", [c, attended], outward, columns, biased),
		...layerScale(config, "self_attention.layer_scale"),
		...norm("mlp.linear_fc1"),
		...projection("mlp.linear_fc1", [first, c], inward, shard, biased),
		...projection("mlp.linear_fc2", [c, f], outward, columns, biased),
		...layerScale(config, "mlp.layer_scale"),
	];
}
