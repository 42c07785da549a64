/** Numbering of layers in the keys of a torch_dist checkpoint: detected when it is read, chosen when it is written. */
import { hasLayer, type LayerKind, storedPattern } from "../../config/hybrid-pattern.ts";
import { initialise, philoxKey } from "../../models/initialise.ts";
import { describedConfig } from "../../models/language/from-configuration.ts";
import { layerPrefix } from "../../models/language/layer-numbering.ts";
import { hybridParameters } from "../../models/language/names.ts";
import type { ParameterSpec } from "../../models/parameter-spec.ts";
import { Device } from "../../native/device.ts";
import { openLibrary } from "../../native/library.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { Tensor } from "../../tensor/index.ts";
import { type DtypeTag, elementCount, encodeFloats } from "../dtype.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import { MappedStore, planTensors } from "../mapping.ts";
import { selectTensors, type TensorStore, type TensorType } from "../store.ts";
import { patternOfArguments } from "../torch-dist/arguments.ts";
import type { JsonObject } from "../torch-dist/common.ts";
import { optimizerName } from "../training/tensors.ts";
import {
	type LayerNames,
	layerOf,
	layersByBlock,
	layersOfGpt,
	mixesTokens,
	type NumberedLayer,
	renamedLayers,
} from "./layouts.ts";

export interface MegatronLayers {
	readonly names: LayerNames;
	/** With the groups that the names count; null: unknown. */
	readonly pattern: string | null;
	/** Layers of the main part with their numbers; empty if names are physical. */
	readonly layers: readonly NumberedLayer[];
}

const lastNorm = "language_model.decoder.final_layernorm.weight";

/**
 * `weights`: model tensors, names as readKeys gives them. `given`: the pattern that the user names; it must have the layers of the
 * checkpoint's own. Throws a UserError that names `path`.
 */
export function layersInCheckpoint(
	weights: Pick<TensorStore, "tensors">,
	args: JsonObject,
	given: string | null,
	path: string,
): MegatronLayers {
	const own = patternOfArguments(args);
	if (own !== null && given !== null) requireSameLayers(own, given, args.mtp_use_repeated_layer === true, path);
	const pattern = [own, given].find((some) => some?.includes("[")) ?? own ?? given;
	if (!weights.tensors.has(lastNorm)) return { names: "physical", pattern, layers: [] };
	const hasMamba = [...weights.tensors.keys()].some((name) => layerOf(name) !== null && /\.mixer\./.test(name));
	const groups = pattern?.includes("[") && (hasMamba || !hasLayer(pattern, "mamba"));
	if (own === null && !hasMamba && !groups) {
		requireGptTensors(weights, path);
		const target = given ?? gptPattern(weights, path);
		const layers = layersOfGpt(target, path);
		requireLayersOf(weights, layers, target, path);
		return { names: "gpt", pattern: target, layers };
	}
	if (pattern === null || !groups) {
		const what = pattern === null ? "it has no pattern" : `its pattern "${pattern}" has no groups`;
		throw new UserError(
			`${path} counts layers by their groups (its last norm is decoder.final_layernorm), but ${what}; name them with --hybrid-layer-pattern.`,
		);
	}
	return { names: "logical", pattern, layers: layersByBlock(pattern, path) };
}

/** Throws a UserError unless two patterns have the same layers, however they are cut and grouped. */
export function requireSameLayers(own: string, given: string, repeated: boolean, path: string): void {
	const [there, here] = [own, given].map((pattern) => storedPattern(pattern, { repeated }));
	if (there !== here) throw new UserError(`${path} has the layers "${there}", and the pattern given has "${here}".`);
}

/** Model tensors of a GPT model that have a place in this program's. */
const gptLayer =
	"(self_attention\\.(linear_qkv\\.(layer_norm_)?(weight|bias)|linear_proj\\.(post_layernorm\\.)?(weight|bias)|[qk]_layernorm\\.weight|core_attention\\.softmax_offset|linear_q_proj\\.weight|linear_(q|kv)_down_proj\\.weight|linear_(q|kv)_up_proj\\.(layer_norm_)?weight|in_proj\\.(layer_norm_)?weight|conv1d\\.weight|A_log|dt_bias|out_(norm|proj)\\.weight)|input_layernorm\\.weight|pre_mlp_layernorm\\.(weight|bias)|mlp\\.(linear_fc1\\.layer_norm_(weight|bias)|linear_fc[12]\\.(post_layernorm\\.)?(weight|bias)|router\\.(weight|bias|expert_bias)|fc[12]_latent_proj\\.(weight|bias)|experts\\.linear_fc[12]\\.(weight|bias)\\d+|shared_experts\\.(linear_fc[12]\\.weight|gate_weight)))";
const gptTensors = new RegExp(
	`^language_model\\.(embedding\\.(word|position)_embeddings\\.weight|output_layer\\.weight|decoder\\.final_layernorm\\.(weight|bias)|decoder\\.layers\\.\\d+\\.${gptLayer}|mtp\\.layers\\.\\d+\\.((enorm|hnorm|final_layernorm)\\.(weight|bias)|eh_proj\\.weight|(mtp_model|transformer)_layer\\.${gptLayer}))$`,
);

function requireGptTensors({ tensors }: Pick<TensorStore, "tensors">, path: string): void {
	const others = [...tensors.keys()].filter((name) => name.startsWith("language_model.") && !gptTensors.test(name));
	if (others.length === 0) return;
	const more = others.length > 5 ? ` and ${others.length - 5} more` : "";
	throw new UserError(
		`${path} is of a GPT model with tensors that this program's has no place for: ${others.slice(0, 5).join(", ")}${more}.`,
	);
}

/** Numbers of the layers of a GPT model, of those of them with experts, and of those with Gated DeltaNet. */
function numberedLayers({ tensors }: Pick<TensorStore, "tensors">) {
	const numbers = (names: readonly string[]): ReadonlySet<number> =>
		new Set(names.map(layerOf).filter((layer): layer is number => layer !== null));
	const names = [...tensors.keys()];
	return {
		layers: numbers(names),
		experts: numbers(names.filter((name) => /\.mlp\.router\./.test(name))),
		deltas: numbers(names.filter((name) => name.endsWith(".self_attention.A_log"))),
	};
}

/**
 * `[*-]` or `[*E]` for every layer, `/*-` or `/*E` for every depth of multi-token prediction; with + for * where keys have a latent, and G
 * in layers with Gated DeltaNet.
 */
function gptPattern(weights: Pick<TensorStore, "tensors">, path: string): string {
	const { layers, experts, deltas } = numberedLayers(weights);
	if (layers.size === 0) throw new UserError(`${path} has no layers.`);
	const names = [...weights.tensors.keys()];
	const mixer = names.some((name) => name.includes(".linear_kv_up_proj.")) ? "+" : "*";
	const main = Array.from(
		{ length: layers.size },
		(_, layer) => `[${deltas.has(layer) ? "G" : mixer}${experts.has(layer) ? "E" : "-"}]`,
	);
	const depths = new Set(names.map((name) => /^language_model\.mtp\.layers\.(\d+)\./.exec(name)?.[1]));
	depths.delete(undefined);
	const routed = names.some((name) => /^language_model\.mtp\..*\.mlp\.router\./.test(name));
	return main.join("") + `/${mixer}${routed ? "E" : "-"}`.repeat(depths.size);
}

/** Every layer of the checkpoint has a place in the pattern; a tensor that the pattern wants and lacks is an error later. */
function requireLayersOf(
	weights: Pick<TensorStore, "tensors">,
	layers: readonly NumberedLayer[],
	pattern: string,
	path: string,
): void {
	const there = numberedLayers(weights);
	const wanted = layers.filter(({ kind }) => mixesTokens(kind)).length;
	if (there.layers.size !== wanted) {
		throw new UserError(
			`${path} is a GPT model of ${counted(there.layers.size, "layer")}, and pattern "${pattern}" has ${wanted} * of them.`,
		);
	}
	for (const { kind, number } of layers) {
		if (number === null || mixesTokens(kind) || (kind === "moe") === there.experts.has(number)) continue;
		const [has, names] = kind === "moe" ? ["a dense MLP", "E"] : ["experts", "-"];
		throw new UserError(`${path} has ${has} in layer ${number}, and pattern "${pattern}" names it ${names}.`);
	}
}

/** The checkpoint's tensors under physical names. */
export function physicalNames(
	store: TensorStore,
	{ names, layers, pattern }: MegatronLayers,
	path: string,
): TensorStore {
	if (names === "physical") return store;
	const renamed = renamedLayers(store, layers, "physical", {
		...{ layernorm: true, pattern: pattern!, path },
	});
	return new MappedStore(store, planTensors(store, renamed, "logical"));
}

/** The layers of a checkpoint to write; `pattern`: the model's, with its groups; null: unknown. */
export function layersToWrite(names: LayerNames, pattern: string | null, path: string): MegatronLayers {
	if (names === "physical") return { names, pattern: pattern?.replaceAll(/[[\]]/g, "") ?? null, layers: [] };
	if (pattern === null) {
		throw new UserError(`${path}: the model's layers are unknown; name them with --hybrid-layer-pattern.`);
	}
	if (names === "gpt") return { names, pattern, layers: layersOfGpt(pattern, path) };
	if (!pattern.includes("[")) {
		throw new UserError(
			`${path}: pattern "${pattern}" has no groups to count layers by; name them with --hybrid-layer-pattern.`,
		);
	}
	return { names, pattern, layers: layersByBlock(pattern, path) };
}

/** Physical tensors under a checkpoint's names, and the numbers of the layers that have no place there and are left out. */
export function namesToWrite(
	store: TensorStore,
	{ names, layers, pattern }: MegatronLayers,
	path: string,
): { readonly tensors: TensorStore; readonly leftOut: readonly number[] } {
	if (names === "physical") return { tensors: store, leftOut: [] };
	const leftOut = layers.flatMap(({ number }, index) => (number === null ? [index] : []));
	const kept = selectTensors(store, (name) => !leftOut.includes(layerOf(name) ?? -1));
	const renamed = renamedLayers(kept, layers, "other", {
		...{ layernorm: true, depthIsLayer: names === "gpt" },
		...{ pattern: pattern!, path },
	});
	return { tensors: new MappedStore(kept, planTensors(kept, renamed, "foreign")), leftOut };
}

/** Megatron's arguments that say how the layers are numbered. */
export function layerArguments({ names, pattern, layers }: MegatronLayers): JsonObject {
	if (names === "gpt") {
		const { length } = layers.filter(({ kind }) => mixesTokens(kind));
		return {
			hybrid_layer_pattern: null,
			hybrid_override_pattern: null,
			num_layers: length,
			...moeFrequency(layers),
			...deltaFrequency(layers),
		};
	}
	if (pattern === null) return {};
	return {
		hybrid_layer_pattern: pattern,
		num_layers: pattern.split("/")[0]!.replaceAll(/[|[\]]/g, "").length,
	};
}

/** Megatron's argument that says which layers of a GPT model have experts. */
function moeFrequency(layers: readonly NumberedLayer[]): JsonObject {
	const routed = layers
		.filter(({ kind }) => kind === "mlp" || kind === "moe")
		.map(({ kind }) => Number(kind === "moe"));
	if (!routed.includes(1)) return {};
	return { moe_layer_freq: routed.includes(0) ? routed : 1 };
}

/** Megatron's argument that says which layers of a GPT model have Gated DeltaNet. */
function deltaFrequency(layers: readonly NumberedLayer[]): JsonObject {
	const mixers = layers.filter(({ kind }) => mixesTokens(kind)).map(({ kind }) => Number(kind === "gdn"));
	return mixers.includes(1) ? { linear_attention_freq: mixers } : {};
}

/** Whether a checkpoint's keys stack layers along an axis: those of a GPT model whose layers are all of one kind. */
export function stacksLayers({ names, layers }: MegatronLayers): boolean {
	const mixed = (...kinds: readonly LayerKind[]) => kinds.every((kind) => layers.some((layer) => layer.kind === kind));
	return names === "gpt" && !mixed("mlp", "moe") && !mixed("gdn", "attention");
}

// Layers that a source has no counterpart for, Mamba-2 layers of a hybrid model that was a GPT model: initial values as a training
// from the start draws them (docs/spec/language-model.md §6), zero moments.

/** Tensors of new layers. Their values exist once they were drawn. */
export class NewLayers implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #values = new Map<string, Uint8Array>();

	private constructor(
		readonly path: string,
		private readonly specs: readonly ParameterSpec[],
		private readonly seed: number,
		types: ReadonlyMap<string, TensorType>,
	) {
		this.tensors = types;
	}

	/**
	 * `layers`: their numbers. Weights have the type `dtype` where a run has them in its own; `optimizer`: with masters and moments.
	 * Throws a UserError that names `path` where the configuration's sizes make no Mamba-2 layer.
	 */
	static of(
		path: string,
		layers: readonly number[],
		configuration: LanguageModelConfiguration,
		{ dtype, optimizer, seed }: { readonly dtype: DtypeTag; readonly optimizer: boolean; readonly seed: number },
	): NewLayers {
		requireSizes(configuration, path);
		const prefixes = layers.map(layerPrefix);
		const specs = hybridParameters(describedConfig(configuration, { bf16: false })).filter(({ name }) =>
			prefixes.some((prefix) => name.startsWith(prefix)),
		);
		const types = new Map<string, TensorType>();
		for (const { name, shape, alwaysF32 } of specs) {
			types.set(name, { dtype: alwaysF32 ? "F32" : dtype, shape });
			if (!optimizer) continue;
			for (const state of ["param", "exp_avg", "exp_avg_sq"] as const)
				types.set(optimizerName(state, name), { dtype: "F32", shape });
		}
		return new NewLayers(path, specs, seed, types);
	}

	/** Draws the values; before it none can be read. */
	async draw(): Promise<void> {
		using device = Device.open(await openLibrary("cpu"), { threads: 1 });
		for (const { name, shape, initialisation } of this.specs) {
			const rows = shape[0]!;
			const columns = elementCount(shape)! / rows;
			using tensor = Tensor.empty(device, [rows, columns], "f32");
			const block = { firstRow: 0, rows, firstColumn: 0, columns, fullWidth: columns };
			initialise(device, tensor, initialisation, philoxKey(this.seed, name), block);
			const values = tensor.toFloat32();
			this.#values.set(name, encodeFloats(this.tensors.get(name)!.dtype, values));
			this.#values.set(optimizerName("param", name), encodeFloats("F32", values));
		}
	}

	originsOf(): [] {
		return [];
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const values = this.#values.get(name);
		if (values) into.set(values.subarray(offset, offset + into.byteLength));
		else if (/^optimizer\.state\.exp_avg(_sq)?\./.test(name)) into.fill(0);
		else throw new RangeError(`The values of ${name} were not drawn yet.`);
	}

	[Symbol.dispose](): void {
		this.#values.clear();
	}
}

function requireSizes(c: LanguageModelConfiguration, path: string): void {
	const sizes = [c.mambaNumHeads, c.mambaHeadDim, c.mambaNumGroups, c.mambaStateDim];
	if (sizes.every((size) => Number.isSafeInteger(size) && size > 0) && c.mambaNumHeads % c.mambaNumGroups === 0) return;
	throw new UserError(
		`${path}: no Mamba-2 layer has mamba-num-heads ${c.mambaNumHeads}, mamba-head-dim ${c.mambaHeadDim}, mamba-num-groups ${c.mambaNumGroups} and mamba-state-dim ${c.mambaStateDim}.`,
	);
}
