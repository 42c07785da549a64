/** Megatron torch_dist checkpoints as source and target of conversions (docs/spec/checkpoint.md §1–§3, §8.4). */
import { hasLayer } from "../../config/hybrid-pattern.ts";
import { UserError } from "../../system/errors.ts";
import { decodeFloats, dtypes, encodeFloats } from "../dtype.ts";
import type { Durability } from "../files.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import { MappedStore, planTensors } from "../mapping.ts";
import type { Json } from "../native/manifest.ts";
import { joinStores, selectTensors, type TensorStore, typeOf } from "../store.ts";
import {
	argumentsOf,
	configurationFromArguments,
	elasticArguments,
	elasticFromArguments,
	patternOfArguments,
} from "../torch-dist/arguments.ts";
import {
	extraStates,
	isJsonObject,
	type JsonObject,
	namespace,
	pythonMap,
	pythonOf,
	readCommon,
	readParameterGroups,
	unflatten,
} from "../torch-dist/common.ts";
import { TorchDistFolder } from "../torch-dist/folder.ts";
import { type KeyStyle, readKeys, writeKeys } from "../torch-dist/keys.ts";
import { optimizerBuffers } from "../torch-dist/optimizer-buffers.ts";
import { writeTorchDistFiles } from "../torch-dist/writer.ts";
import { toMegatron } from "../training/record.ts";
import { isOptimizerName } from "../training/tensors.ts";
import { fromLayout, type LayerNames, layoutOfArguments, toLayout } from "./layouts.ts";
import {
	layerArguments,
	layersInCheckpoint,
	layersToWrite,
	type MegatronLayers,
	NewLayers,
	namesToWrite,
	physicalNames,
	requireSameLayers,
	stacksLayers,
} from "./megatron-layers.ts";
import type { NewLayerOptions, SourceCheckpoint, SourceOptions, StoredObject } from "./source.ts";

/** Objects of a native checkpoint that were byte items here. */
const itemPrefix = "torch_dist/";

export function openTorchDistSource(path: string, options: SourceOptions): SourceCheckpoint {
	const folder = TorchDistFolder.open(path);
	try {
		const common = readCommon(folder, options.inert);
		const warnings = folder.notice === null ? [] : [folder.notice];
		if (Object.keys(common).length === 0) {
			warnings.push(`${folder.path} has no common.pt, or an empty one: its iteration and settings are not known.`);
		}
		const args = isJsonObject(common.args) ? common.args : {};
		const whole = unflatten(folder, folder.catalog.flattened);
		const { correspondence, style, buffers } = readKeys(whole.tensors, folder.path);
		const isState = (name: string) => name.startsWith("optimizer.state.");
		const flat = new Set(buffers);
		const stored = selectTensors(whole, (key) => !flat.has(key));
		const all = new MappedStore(stored, planTensors(stored, correspondence, "logical"));
		const layout = layoutOfArguments(args, path);
		const named = selectTensors(all, (name) => !isState(name));
		const layers = layersInCheckpoint(named, args, options.pattern, path);
		const canonical = (store: TensorStore) => physicalNames(fromLayout(store, layout, path), layers, path);
		const model = canonical(named);
		let weights: TensorStore = model;
		if (options.optimizer) {
			const states = [canonical(selectTensors(all, isState))];
			if (buffers.length > 0) {
				const source = selectTensors(whole, (key) => flat.has(key));
				const found = optimizerBuffers(source, buffers, model);
				states.push(new MappedStore(source, planTensors(source, found, "logical")));
			}
			weights = joinStores(path, [model, ...states]);
		}
		const groups = options.optimizer ? readParameterGroups(folder, common, options.inert) : {};
		const configuration = configurationFromArguments({
			...args,
			...(layers.names === "gpt" ? options.newLayers.sizes : {}),
			...(layers.pattern === null ? {} : { hybrid_layer_pattern: layers.pattern }),
			// Model providers may untie the output layer, or leave biases out, whatever the arguments say; the weights tell.
			add_bias_linear: [...model.tensors.keys()].some((name) => outputBias.test(name)),
			untie_embeddings_and_output_weights: model.tensors.has("language_model.output_layer.weight"),
		});
		if (configuration?.applyLayernorm1p) weights = shiftedNorms(weights, 1);
		const iteration = typeof common.iteration === "number" ? common.iteration : null;
		const added = newLayers(folder.path, layers, configuration, weights, options.newLayers);
		if (added !== null) {
			weights = joinStores(path, [weights, added.store]);
		}
		return {
			format: "torch_dist",
			path: folder.path,
			notices: added === null ? [] : [added.notice],
			warnings,
			weights,
			...(added && { prepare: () => added.store.draw() }),
			stored: folder,
			configuration,
			model: {
				...(configuration as unknown as JsonObject | null),
				...(style.routers && { flextron: true, ...(args.flextron === true && elasticFromArguments(args)) }),
			},
			iteration,
			common: { megatron: common, optimizer: { paramGroups: groups } },
			spelling: { torchDist: { ...style, layerNames: layers.names } as unknown as Json },
			objects: keptItems(folder),
			[Symbol.dispose]: () => folder[Symbol.dispose](),
		};
	} catch (error) {
		folder[Symbol.dispose]();
		throw error;
	}
}

/** The norm inside Gated DeltaNet, and its fp32 master. */
const deltaNorm = /^(?:optimizer\.state\.param\.)?language_model\..*\.self_attention\.out_norm\.weight$/;

/**
 * With apply-layernorm-1p Megatron stores the norm inside Gated DeltaNet minus 1 too, which multiplies by γ here. `by` is added, and the
 * sum rounded to the tensor's type: of a γ between 0.5 and 2 minus 1 nothing is lost.
 */
function shiftedNorms(store: TensorStore, by: number): TensorStore {
	return {
		path: store.path,
		tensors: store.tensors,
		originsOf: (name) => [{ store, name }],
		readInto: (name, offset, into) => {
			if (!deltaNorm.test(name)) return store.readInto(name, offset, into);
			const { dtype } = typeOf(store, name);
			const bytes = dtypes[dtype].bits / 8;
			const first = Math.floor(offset / bytes);
			const whole = new Uint8Array((Math.ceil((offset + into.byteLength) / bytes) - first) * bytes);
			store.readInto(name, first * bytes, whole);
			const shifted = encodeFloats(
				dtype,
				Float64Array.from(decodeFloats(dtype, whole), (value) => value + by),
			);
			into.set(shifted.subarray(offset - first * bytes, offset - first * bytes + into.byteLength));
		},
		[Symbol.dispose]: () => store[Symbol.dispose](),
	};
}

/** A bias that a language model has with add_bias_linear alone. */
const outputBias =
	/^language_model\.decoder\.layers\.\d+\.(self_attention\.linear_proj|mlp\.(experts\.)?linear_fc[12])\.bias\d*$/;

/** The layers of a hybrid model that have no counterpart in a GPT checkpoint; null if every layer has. */
function newLayers(
	path: string,
	{ names, layers }: MegatronLayers,
	configuration: LanguageModelConfiguration | null,
	{ tensors }: TensorStore,
	{ seed }: NewLayerOptions,
): { readonly store: NewLayers; readonly notice: string } | null {
	const numbers = layers.flatMap(({ number }, index) => (number === null ? [index] : []));
	if (names !== "gpt" || numbers.length === 0) return null;
	if (configuration === null) throw new RangeError("A GPT checkpoint with a pattern has a configuration.");
	const store = NewLayers.of(path, numbers, configuration, {
		dtype: tensors.get("language_model.embedding.word_embeddings.weight")?.dtype ?? "F32",
		optimizer: [...tensors.keys()].some(isOptimizerName),
		seed,
	});
	const notice = `${path} is of a GPT model, without the Mamba-2 layers ${numbers.join(", ")}: they get initial values (seed ${seed}).`;
	return { store, notice };
}

/** An extra state of more bytes than this is not the empty one. */
const EMPTY_STATE = 4096;

/** Byte items worth keeping as they are: random states, and extra states with content. Empty ones are made anew. */
function keptItems(folder: TorchDistFolder): ReadonlyMap<string, StoredObject> {
	const kept = new Map<string, StoredObject>();
	for (const [name, { length }] of folder.objects) {
		const state = /\._extra_state\//.test(name) && length > EMPTY_STATE;
		if (!state && !/(^|\.)rng_state\//.test(name)) continue;
		kept.set(itemPrefix + name, { encoding: "torch-save", bytes: folder.readItem(name) });
	}
	return kept;
}

export interface TorchDistTarget {
	readonly tensors: TensorStore;
	/** Whether it is of a GPT model, whose tensors have other names when they are read again. */
	readonly otherNames: boolean;
	/** Sentences about what is lost. */
	readonly warnings: readonly string[];
	/** Name of the iteration's folder, and the tracker's text. */
	readonly folder: string;
	readonly tracker: string;
	readonly write: (folder: string, onBytes: (bytes: number) => void) => void;
}

export interface TorchDistTargetOptions extends Durability {
	readonly shardBytes: number;
	readonly wrapper: string | null;
	/** null: as the source's were, physical otherwise. */
	readonly layerNames: LayerNames | null;
	/** The model's, with its groups; null: as the source says it. */
	readonly pattern: string | null;
}

/** Plans a checkpoint for a source's tensors; optimizer state is written `fully_reshardable`. */
export function torchDistTarget(
	source: SourceCheckpoint,
	canonical: TensorStore,
	path: string,
	options: TorchDistTargetOptions,
): TorchDistTarget {
	const layers = layersFor(source, options);
	const own = source.configuration?.applyLayernorm1p ? shiftedNorms(canonical, -1) : canonical;
	const kept = isJsonObject(source.common.megatron) ? source.common.megatron.args : null;
	// The arguments that stay beside the tensors say how gated rows lie.
	const laid = isJsonObject(kept) ? toLayout(own, layoutOfArguments(kept, source.path), source.path) : own;
	const { tensors: weights, leftOut } = namesToWrite(laid, layers, source.path);
	if ([...weights.tensors.keys()].some((name) => name.startsWith("optimizer.state.momentum_buffer."))) {
		throw new UserError(
			`${source.path} was trained with optimizer muon, whose momenta torch_dist checkpoints do not get here; convert without the optimizer (--no-optimizer).`,
		);
	}
	const style = styleFor(source, weights, options.wrapper);
	const keys = writeKeys(weights.tensors, style, path, stacksLayers(layers));
	const tensors = new MappedStore(weights, planTensors(weights, keys, "foreign"));
	const optimizer = [...weights.tensors.keys()].some((name) => name.startsWith("optimizer.state."));
	const groups = optimizer ? parameterGroups(source) : {};
	const objects = style.plain ? new Map<string, unknown>() : groupObjects(groups);
	const warnings: string[] = [];
	if (leftOut.length > 0) {
		warnings.push(
			`A GPT model has no place for the Mamba-2 layers ${leftOut.join(", ")} of ${source.path}: they are left out.`,
		);
	}
	// States of modules go by the layers' numbers of the checkpoint that they came from.
	const renamed = layers.names !== (source.spelling.torchDist as KeptStyle | undefined)?.layerNames;
	const items = new Map(
		[...source.objects]
			.filter(([name]) => name.startsWith(itemPrefix) && !(renamed && /\._extra_state\//.test(name)))
			.map(([name, { bytes }]) => [name.slice(itemPrefix.length), bytes]),
	);
	const random = [...items.keys()].some((name) => name.includes("rng_state/"));
	const common = commonFor(source, weights, layers, optimizer, style.plain ? groups : null, random);
	const release = source.iteration === null;
	const wanted = extraStates(tensors.tensors, { outputLayer: layers.names === "physical" });
	const states = new Map([...wanted].filter(([name]) => !items.has(name)));
	return {
		...{ tensors, warnings, otherNames: layers.names === "gpt" },
		folder: release ? "release" : `iter_${String(source.iteration).padStart(7, "0")}`,
		tracker: release ? "release" : String(source.iteration),
		write: (folder, onBytes) =>
			writeTorchDistFiles(
				folder,
				{ tensors, extraStates: states, items, objects, common },
				{ fileBytes: options.shardBytes, onBytes, sync: options.sync },
			),
	};
}

/** Key style that a native checkpoint keeps of its source; older ones do not say how layers were numbered. */
type KeptStyle = KeyStyle & { readonly layerNames?: LayerNames };

function layersFor(source: SourceCheckpoint, { layerNames, pattern: given }: TorchDistTargetOptions): MegatronLayers {
	const { configuration, path } = source;
	const own = configuration?.hybridLayerPattern ?? null;
	if (own !== null && given !== null) {
		requireSameLayers(own, given, configuration!.mtpUseRepeatedLayer === true, path);
	}
	const pattern = [given, own].find((some) => some?.includes("[")) ?? own ?? given;
	const kept = (source.spelling.torchDist as KeptStyle | undefined)?.layerNames ?? "physical";
	// A model that has come to lack groups, or to have Mamba-2 layers, does not go back under such names by itself.
	const fits =
		kept === "logical" ? pattern?.includes("[") : kept === "gpt" && pattern !== null && !hasLayer(pattern, "mamba");
	return layersToWrite(layerNames ?? (fits ? kept : "physical"), pattern, path);
}

/** Key style of the target: the source's, otherwise the style of a run with these dtypes. */
function styleFor(source: SourceCheckpoint, weights: TensorStore, wrapper: string | null): KeyStyle {
	const kept = source.spelling.torchDist as unknown as KeyStyle | undefined;
	const roots = new Set<string>();
	for (const name of weights.tensors.keys()) {
		const root = /^(?:optimizer\.state\.[^.]+\.)?(language_model\.|modality_submodules\.[^.]+\.)/.exec(name)?.[1];
		if (root) roots.add(root);
	}
	if (kept && wrapper === null) return kept;
	const half = weights.tensors.get("language_model.embedding.word_embeddings.weight")?.dtype !== "F32";
	const segments = wrapper ?? (half ? "module.module." : "module.");
	const plain = kept?.plain ?? roots.size === 1;
	return { plain, wrappers: Object.fromEntries([...roots].map((root) => [root, segments])) };
}

/** Optimizer groups by module, one list a chained optimizer (dense, experts). */
type ParameterGroups = Readonly<Record<string, readonly (readonly JsonObject[])[]>>;

function parameterGroups(source: SourceCheckpoint): ParameterGroups {
	const optimizer = isJsonObject(source.common.optimizer) ? source.common.optimizer : {};
	const kept = optimizer.paramGroups as ParameterGroups | undefined;
	if (kept && Object.keys(kept).length > 0) return kept;
	throw new UserError(
		`${source.path} has optimizer state but no optimizer groups, which Megatron needs; convert without it (--no-optimizer).`,
	);
}

/** MIMO keeps groups in byte items, not in the common state. */
function groupObjects(groups: ParameterGroups): Map<string, unknown> {
	const objects = new Map<string, unknown>();
	for (const [module, chains] of Object.entries(groups)) {
		chains.forEach((chain, index) => {
			const prefix = `mimo.${module}.optimizer.mimo.${module}${index === 0 ? "" : `.${index}`}`;
			objects.set(`${prefix}.param_groups/shard_0_1`, pythonOf(chain as unknown as Json));
			objects.set(`${prefix}.param_state_sharding_type/shard_0_1`, "fully_reshardable");
		});
	}
	return objects;
}

function commonFor(
	source: SourceCheckpoint,
	weights: TensorStore,
	layers: MegatronLayers,
	optimizer: boolean,
	groups: ParameterGroups | null,
	random: boolean,
): Map<string, unknown> {
	const kept = isJsonObject(source.common.megatron) ? source.common.megatron : {};
	const { args, optimizer: _, content_metadata: content, ...rest } = kept;
	const common = pythonMap(rest);
	common.set("checkpoint_version", 3);
	common.set("iteration", source.iteration ?? 0);
	common.set(
		"content_metadata",
		new Map<string, unknown>([
			...pythonMap(
				isJsonObject(content) ? content : { singleton_local_shards: false, chained_optim_avoid_prefix: true },
			),
			["distrib_optim_sharding_type", "fully_reshardable"],
		]),
	);
	const flags = { no_save_optim: !optimizer, no_save_rng: !random };
	const trained = toMegatron(source.common);
	for (const [key, value] of pythonMap(trained.state)) if (optimizer) common.set(key, value);
	const known = isJsonObject(args) ? args : argumentsFor(source.configuration, weights);
	const numbered = known === null ? {} : numberingArguments(known, layers);
	if (known)
		common.set(
			"args",
			namespace({ ...known, ...elasticArguments(source.model), ...numbered, ...trained.args, ...flags }),
		);
	if (groups) {
		const chains = Object.values(groups)[0] ?? [];
		const states = chains.map(
			(chain) =>
				new Map<string, unknown>([
					["optimizer", new Map([["param_groups", pythonOf(chain as unknown as Json)]])],
					["param_state_sharding_type", "fully_reshardable"],
				]),
		);
		common.set("optimizer", states.length === 1 ? states[0] : new Map(states.map((state, i) => [i, state])));
	}
	return common;
}

/** Megatron's arguments about the numbering of layers; pipeline cuts stay as they were. */
function numberingArguments(known: JsonObject, layers: MegatronLayers): JsonObject {
	const uncut = (pattern: string | null) => pattern?.replaceAll("|", "");
	const same = layers.names !== "gpt" && uncut(patternOfArguments(known)) === uncut(layers.pattern);
	return same ? {} : layerArguments(layers);
}

function argumentsFor(configuration: LanguageModelConfiguration | null, weights: TensorStore): JsonObject | null {
	if (configuration === null) return null;
	const rows = weights.tensors.get("language_model.embedding.word_embeddings.weight")?.shape[0];
	return argumentsOf(configuration, rows ?? configuration.vocabSize);
}
