/** Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. */

import { join } from "node:path";
import * as v from "valibot";
import { adaptedWeight, type LoraConfig } from "../../models/lora.ts";
import { UserError } from "../../system/errors.ts";
import { configLimits, readJsonText } from "../../system/json.ts";
import { type Durability, OutputFile } from "../files.ts";
import { familyFor } from "../hf/families/index.ts";
import { formatPythonJson, parsePythonJson, pythonFloat } from "../hf/json.ts";
import { compareTensors, MappedStore, planTensors, requireMatch } from "../mapping.ts";
import { openSafetensors, streamSafetensors } from "../safetensors.ts";
import { joinStores, readPieces, readTensor, selectTensors, type TensorStore } from "../store.ts";
import {
	type AdaptedModel,
	type CopiedMatrix,
	type ModuleSpelling,
	matrixName,
	moduleOf,
	peftCorrespondence,
	peftSpelling,
	targetExpression,
	weightsOf,
} from "./peft-names.ts";

export const adapterConfigName = "adapter_config.json";
const valuesName = "adapter_model.safetensors";

/** The settings that decide an adapter's function. */
export type AdapterSettings = Pick<LoraConfig, "rank" | "alpha" | "dropout">;

export interface PlannedAdapters {
	/** Under PEFT's names. */
	readonly tensors: TensorStore;
	/** Sentences about what is lost. */
	readonly warnings: readonly string[];
	readonly write: (folder: string, onBytes?: (bytes: number) => void) => void;
}

/**
 * Plans a folder for the adapters of a model. `base`: the Hugging Face model that they are for, as adapter_config.json shall
 * name it; null: unknown.
 */
export function planPeftFolder(
	adapters: TensorStore,
	settings: AdapterSettings,
	model: AdaptedModel,
	options: { readonly spelling: ModuleSpelling; readonly base: string | null; readonly path: string } & Durability,
): PlannedAdapters {
	const { path, spelling } = options;
	const weights = new Set([...adapters.tensors.keys()].map(adaptedWeight));
	const { builder, copies, modules } = peftCorrespondence(weights, settings.rank, model, spelling, path);
	const fused = convertedFamilies.includes(spelling.family ?? "");
	if (spelling.family !== undefined) requireConvertible(modules, spelling.family, path);
	const mapped = new MappedStore(adapters, planTensors(adapters, builder, "foreign"));
	const logicalOf = new Map(copies.map(({ foreign, logical }) => [foreign, logical]));
	const copied: TensorStore = {
		path: adapters.path,
		tensors: new Map(copies.map(({ foreign, logical }) => [foreign, adapters.tensors.get(logical)!])),
		originsOf: (name) => [{ store: adapters, name: logicalOf.get(name)! }],
		readInto: (name, offset, into) => adapters.readInto(logicalOf.get(name)!, offset, into),
		[Symbol.dispose]: () => {},
	};
	const tensors = joinStores(adapters.path, [mapped, copied]);
	const inScan = modules.some((module) => module.endsWith(".mixer.out_proj"));
	return {
		tensors,
		warnings: inScan
			? [
					`${path} has adapters on out_proj, which the peft package refuses for models with Mamba layers: their fused kernels read that weight alone. Merged weights (\`mimo convert-ckpt --to hf\`) have no such limit.`,
				]
			: [],
		write: (folder, onBytes) => {
			using output = new OutputFile(join(folder, valuesName), options);
			const entries = [...tensors.tensors].map(([name, type]) => ({
				name,
				...type,
				data: () => readPieces(tensors, name),
			}));
			streamSafetensors(output, entries, { format: "pt" }, { piece: (_, bytes) => onBytes?.(bytes.byteLength) });
			output.close();
			using config = new OutputFile(join(folder, adapterConfigName), options);
			config.write(new TextEncoder().encode(formatPythonJson(peftConfig(settings, modules, options.base, { fused }))));
			config.close();
		},
	};
}

/**
 * Families whose routed experts, which transformers stacks, peft 0.21 gives the adapters of a file that has them apart
 * (utils/transformers_weight_conversion.py).
 */
const convertedFamilies: readonly string[] = ["qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "glm4v_moe_text"];

/** Throws a UserError for adapters of routed experts that peft would leave out without a word. */
function requireConvertible(modules: readonly string[], family: string, path: string): void {
	const projections = new Set(modules.flatMap((module) => /\.experts\.\d+\.(\w+)$/.exec(module)?.[1] ?? []));
	if (projections.size === 0) return;
	if (!convertedFamilies.includes(family)) {
		throw new UserError(
			`${path}: peft does not load adapters of ${family}'s routed experts; --save-hf writes them merged.`,
		);
	}
	if (projections.has("down_proj")) return;
	throw new UserError(
		`${path}: peft loads adapters of experts.linear_fc1 only beside those of experts.linear_fc2; --save-hf writes them merged.`,
	);
}

/** Projections with the names of routed experts' beside these experts. */
const expertLike = /^(?!.*\.experts\.\d+\.).*\.(gate_proj|up_proj|down_proj)$/;

/**
 * peft's own defaults for what is not said. `fused`: a model of a converted family, in which peft takes every module with the
 * name of an expert's projection for that of the experts; shared experts and dense layers keep their adapters where their
 * weights are named as parameters.
 */
function peftConfig(
	{ rank, alpha, dropout }: AdapterSettings,
	modules: readonly string[],
	base: string | null,
	{ fused }: { readonly fused: boolean },
) {
	const parameters = modules.filter((module) => fused && expertLike.test(module));
	const others = modules.filter((module) => !parameters.includes(module));
	return {
		base_model_name_or_path: base,
		bias: "none",
		fan_in_fan_out: false,
		inference_mode: true,
		init_lora_weights: true,
		lora_alpha: alpha,
		lora_dropout: pythonFloat(dropout),
		modules_to_save: null,
		peft_type: "LORA",
		r: rank,
		target_modules: others.length > 0 ? targetExpression(others, { fused }) : [],
		...(parameters.length > 0 && { target_parameters: parameters.map((module) => `${module}.weight`) }),
		task_type: "CAUSAL_LM",
		use_dora: false,
		use_rslora: false,
	};
}

/** Parameters that are weights of modules: an adapter of one is that of its module. */
function areWeights(value: unknown): boolean {
	return Array.isArray(value) && value.every((name) => typeof name === "string" && name.endsWith(".weight"));
}

/** false, null, 0, an empty list or object. */
function isAbsent(value: unknown): boolean {
	return !value || value === "none" || (typeof value === "object" && Object.keys(value).length === 0);
}

/** Beginnings of A and B that leave W as it is; of the others (PiSSA, OLoRA, CorDA, LoftQ, …) peft changes W at every load. */
const plainBeginnings: readonly unknown[] = [null, true, false, "gaussian", "orthogonal", "eva", "mica"];

/** Fields that make another function than W + (α / r) B A are refused by name. */
const configSchema = v.looseObject({
	peft_type: v.literal("LORA"),
	r: v.pipe(v.number(), v.integer(), v.minValue(1)),
	lora_alpha: v.pipe(v.number(), v.finite()),
	lora_dropout: v.optional(v.number(), 0),
	target_modules: v.optional(v.unknown()),
	...Object.fromEntries(
		[
			...["bias", "fan_in_fan_out", "use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"],
			...["layer_replication", "lora_bias", "trainable_token_indices", "alora_invocation_tokens"],
			...["use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "kasa_config"],
		].map((key) => [key, v.optional(v.custom(isAbsent))]),
	),
	init_lora_weights: v.optional(v.custom((value) => plainBeginnings.includes(value))),
	target_parameters: v.optional(v.custom((value) => isAbsent(value) || areWeights(value))),
});

export interface PeftAdapters extends Disposable {
	readonly settings: AdapterSettings;
	/** Under logical names. */
	readonly weights: TensorStore;
	/** Weights whose modules have an A each, so that their adapters are higher than the rank. */
	readonly stacked: readonly string[];
}

/** Opens a folder; every tensor of it belongs to an adapter of the model. Most values are read when they are asked for. */
export function openPeftFolder(path: string, model: AdaptedModel): PeftAdapters {
	const { targets, ...settings } = readAdapterSettings(path);
	let file: TensorStore = openSafetensors(join(path, valuesName), { inside: path });
	try {
		const named = peftSpelling(file.tensors.keys());
		if (named === null) {
			throw new UserError(
				`${file.path} holds no adapters of a language model (base_model.model.….layers.N.(mixer|self_attn|mlp).….lora_A.weight).`,
			);
		}
		const own = familyFor(model).modelType;
		// Names alone do not tell a family without Gated DeltaNet from Llama.
		const spelling = named.family === "llama" && own !== "nemotron_h" ? { ...named, family: own } : named;
		const modules = new Set([...file.tensors.keys()].map(moduleOf));
		const weights = weightsOf(modules, model, spelling, file.path);
		const apart = peftCorrespondence(weights, settings.rank, model, spelling, file.path, () => false);
		const isTarget = (module: string) => targets?.some((target) => `.${module}`.endsWith(`.${target}`)) ?? true;
		file = withZeros(
			file,
			apart.modules.filter((module) => !modules.has(module) && !isTarget(module)),
			apart.builder.foreign,
		);
		const stacked: string[] = [];
		const share = (own: readonly string[]) => {
			const equal = own.every((module) => sameMatrix(file, matrixName(own[0]!, "A"), matrixName(module, "A")));
			if (!equal) stacked.push(own.join(", "));
			return equal;
		};
		const found = peftCorrespondence(weights, settings.rank, model, spelling, file.path, share);
		const { builder, copies } = found;
		const copyShape = ({ foreign, logical }: CopiedMatrix) => [foreign, builder.logical.get(logical)!] as const;
		requireMatch(file.path, compareTensors(file.tensors, new Map([...builder.foreign, ...copies.map(copyShape)])));
		const further = new Set(copies.map(({ foreign }) => foreign));
		const single = selectTensors(file, (name) => !further.has(name));
		const mapped = new MappedStore(single, planTensors(single, builder, "logical"));
		return { settings, weights: mapped, stacked, [Symbol.dispose]: () => file[Symbol.dispose]() };
	} catch (error) {
		file[Symbol.dispose]();
		throw error;
	}
}

/** The file with adapters of zeros for modules that have none beside others of their weight, such as keys beside queries. */
function withZeros(
	file: TensorStore,
	modules: readonly string[],
	shapes: ReadonlyMap<string, readonly number[]>,
): TensorStore {
	if (modules.length === 0) return file;
	const { dtype } = file.tensors.values().next().value!;
	const names = modules.flatMap((module) => [matrixName(module, "A"), matrixName(module, "B")]);
	const zeros: TensorStore = {
		path: file.path,
		tensors: new Map(names.map((name) => [name, { dtype, shape: [...shapes.get(name)!] }])),
		readInto: (_, __, into) => into.fill(0),
		[Symbol.dispose]: () => {},
	};
	return joinStores(file.path, [file, zeros]);
}

/** Whether two tensors of a file are equal; one that is not there is for later to complain about. */
function sameMatrix(file: TensorStore, one: string, other: string): boolean {
	if (one === other || !file.tensors.has(one) || !file.tensors.has(other)) return true;
	return Bun.deepEquals(readTensor(file, one), readTensor(file, other));
}

/**
 * Reads the settings of a folder's adapters, and the ends of the names of their modules; null: an expression. Throws a UserError for
 * those of another function than this program's.
 */
export function readAdapterSettings(folder: string): AdapterSettings & { readonly targets: readonly string[] | null } {
	const path = join(folder, adapterConfigName);
	const json = parsePythonJson(readJsonText(path, configLimits, { inside: folder }), path);
	const { success, output, issues } = v.safeParse(configSchema, json);
	if (success) {
		const { r: rank, lora_alpha: alpha, lora_dropout: dropout, target_modules: targets } = output;
		return { rank, alpha, dropout, targets: Array.isArray(targets) ? targets.map(String) : null };
	}
	const key = v.getDotPath(issues[0]) ?? "its content";
	throw new UserError(`${path}: ${key} is ${JSON.stringify(json[key])}, which no adapter of this program has.`);
}
