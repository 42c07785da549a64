/**
 * Families of two blocks a layer, attention or Gated DeltaNet and then a gated MLP or experts (docs/spec/families.md §1, §3): layer i is layers 2i and
 * 2i + 1 of this program's pattern.
 */

import { hasLayer, type LayerKind, parsePattern, symbolsOf } from "../../../config/hybrid-pattern.ts";
import { familyDefaults } from "../../../config/language-model.ts";
import { keysOfWindow, windowedLayers } from "../../../config/per-layer.ts";
import { type ActivationKey, activationKeys } from "../../../native/activations.ts";
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import type { CorrespondenceBuilder } from "../../mapping.ts";
import { pythonFloat } from "../json.ts";
import { attention, denseMlp, experts } from "./decoder-names.ts";
import {
	type Ahead,
	addVocabulary,
	count,
	type Family,
	fraction,
	type Json,
	type LanguageModelConfiguration,
	type LayerNames,
	type NameOptions,
	type Refuse,
	readAlike,
	refusalAt,
	type Spelling,
	whole,
} from "./family.ts";
import { addGatedDelta, type GatedDeltaLayout, gatedDeltaLayoutOf } from "./gated-delta-names.ts";
import { readPositions, writtenPositions } from "./positions.ts";

/** The end of the name of a tensor that holds all experts of a layer. */
const stackOfExperts = ".mlp.experts.gate_up_proj";

/** A spelling with stacks of experts, whose shapes tell how each matrix lies; where both ways have one shape, as transformers writes it. */
export function withExpertLayout<S extends Spelling>(
	spelling: S,
	{ hiddenSize, moeFfnHiddenSize }: Pick<LanguageModelConfiguration, "hiddenSize" | "moeFfnHiddenSize">,
	stored: ReadonlyMap<string, { readonly shape: readonly number[] }>,
): S {
	const [, stack] =
		spelling.experts === "packed" ? ([...stored].find(([name]) => name.endsWith(stackOfExperts)) ?? []) : [];
	const transposed = stack?.shape[1] === hiddenSize && stack.shape[2] === 2 * moeFfnHiddenSize;
	return transposed && hiddenSize !== 2 * moeFfnHiddenSize ? { ...spelling, experts: "transposed" } : spelling;
}

/**
 * The spelling of a folder with tensors …embed_tokens.weight and …layers.N.self_attn or linear_attn; null: the names are of another
 * form. `layout`: of the family's Gated DeltaNet; null: it has none.
 */
function detectDecoder(names: Iterable<string>, layout: GatedDeltaLayout | null): Spelling | null {
	const bases = new Set<string>();
	let packed = false;
	let embedded: string | null = null;
	for (const name of names) {
		embedded = /^((?:.*\.)?(?:model\.language_)?model\.)embed_tokens\.weight$/.exec(name)?.[1] ?? embedded;
		const layers = /^(.*?)layers\.\d+\.(?:self_attn\.o_proj|linear_attn\.out_proj)\.weight$/.exec(name)?.[1];
		if (layers !== undefined) bases.add(layers);
		packed ||= name.endsWith(stackOfExperts);
		if ((gatedDeltaLayoutOf(name) ?? layout) !== layout) return null;
	}
	if (embedded === null || !bases.has(embedded)) return null;
	const head = embedded.replace(/(^|\.)model\.(language_model\.)?$/, "$1");
	return { base: embedded, head, experts: packed ? "packed" : "separate" };
}

/** Compares a config.json's layers and experts with the tensors that are there, before names are made from them. */
function requireDecoderCounts(
	{ numLayers, numExperts }: LanguageModelConfiguration,
	{ experts: spelled }: Spelling,
	stored: ReadonlyMap<string, { readonly shape: readonly number[] }>,
	path: string,
): void {
	const tooMany = (
		[
			["num_hidden_layers", numLayers / 2],
			["num_experts", spelled === "separate" ? numExperts : 0],
		] as const
	).find(([, count]) => count > stored.size);
	if (tooMany !== undefined) {
		const [key, count] = tooMany;
		throw new UserError(`${path}: ${key} names ${count}, too many for the ${stored.size} tensors that are there.`);
	}
	for (const [name, { shape }] of stored) {
		if (!name.endsWith(stackOfExperts) || shape[0] === numExperts) continue;
		throw new UserError(`${path}: num_local_experts is ${numExperts}, and ${name} holds ${shape[0]} experts.`);
	}
}

function addDecoderNames(
	rules: DecoderRules,
	builder: CorrespondenceBuilder,
	c: LanguageModelConfiguration,
	{ base, head, experts: spelled }: Spelling,
	options: NameOptions,
): void {
	const vocabulary = (logical: string, foreign: string) => addVocabulary(builder, c, options, { logical, foreign });
	vocabulary("language_model.embedding.word_embeddings.weight", `${base}embed_tokens.weight`);
	const { segments, mtp } = parsePattern(c.hybridLayerPattern);
	const layers = segments.flat(2);
	const standing: Partial<Record<LayerKind, (names: LayerNames) => void>> = {
		attention,
		gdn: (names) => addGatedDelta(names, rules.gatedDelta ?? "joined"),
		moe: (names) => experts(names, { addStacks: rules.stacks, spelled }),
		mlp: denseMlp,
	};
	const addLayer = (kind: LayerKind, logical: string, foreign: string) =>
		(rules.names?.[kind] ?? standing[kind])!({ builder, c, logical, foreign });
	layers.forEach((kind, index) => {
		addLayer(kind, `language_model.decoder.layers.${index}.`, `${base}layers.${Math.floor(index / 2)}.`);
	});
	for (let depth = 0; depth < (mtp?.depths ?? 0); depth++) {
		const logical = `language_model.mtp.layers.${depth}.`;
		const { own, layer, names } = rules.ahead!.places(base, layers.length / 2 + depth, depth);
		const h = c.hiddenSize;
		const same = (name: keyof typeof names, shape: readonly number[]) =>
			builder.same(`${logical}${name}.weight`, `${own}${names[name]}.weight`, shape);
		same("enorm", [h]);
		same("hnorm", [h]);
		same("eh_proj", [h, 2 * h]);
		same("final_layernorm", [h]);
		mtp!.layers.forEach((kind, at) => {
			addLayer(kind, `${logical}mtp_model_layer.layers.${at}.`, layer);
		});
	}
	builder.same("language_model.decoder.final_norm.weight", `${base}norm.weight`, [c.hiddenSize]);
	if (c.untieEmbeddingsAndOutputWeights) vocabulary("language_model.output_layer.weight", `${head}lm_head.weight`);
}

/** The rules that differ between families. */
interface DecoderRules {
	readonly modelType: string;
	readonly architecture: string;
	/** transformers' defaults where they are not `sizes` below. */
	readonly sizes: Readonly<Partial<Record<keyof typeof sizes, number>>>;
	readonly maxPositionEmbeddings: number;
	/** Other fields that mean something else where they are absent or null. */
	readonly defaults?: Json;
	/** Default of head_dim; derived: the class has no such field. Absent: hidden_size / num_attention_heads. */
	readonly headDim?: number | "derived";
	/** The field that names the activation, and its value; absent: hidden_act, silu. */
	readonly activationField?: Json;
	/** The fields of rotary embeddings as other families have them; absent: they are. */
	readonly positions?: (values: Json, bad: Refuse) => Json;
	/** Fields with the only value this program's model has; an absent one has it. */
	readonly only: Json;
	/** The layers with Gated DeltaNet instead of attention; absent: none, as is the order of its projections. */
	readonly linearAttention?: (values: Json, bad: Refuse, layers: number) => readonly boolean[];
	readonly gatedDelta?: GatedDeltaLayout;
	readonly read: (values: Json, bad: Refuse, layers: number) => Partial<LanguageModelConfiguration>;
	/** The kind of every layer's first block; absent: attention. */
	readonly mixer?: LayerKind;
	/** Adds the tensors of a block of this kind; absent: attention as Llama's, experts as Qwen3-MoE's. */
	readonly names?: Partial<Record<LayerKind, (names: LayerNames) => void>>;
	/** Depths of multi-token prediction, each a layer as the main part's, with experts where the family has them; absent: none. */
	readonly ahead?: Ahead & {
		/** The most that are read. */
		readonly most: number;
		/** Where a depth's own tensors and its layer's stand. `index`: of the layer, behind the main part's. */
		readonly places: (base: string, index: number, depth: number) => DepthNames;
	};
	/** Whether a layer has experts; absent: no layer. */
	readonly hasExperts?: (values: Json, layer: number) => boolean;
	/** Default: swiglu. */
	readonly activation?: ActivationKey;
	/** Adds a layer's router and experts, where they are no usual stacks nor tensors of each expert. */
	readonly stacks?: (names: LayerNames) => void;
	/** `kinds`: of every layer's second block. */
	readonly write: (configuration: LanguageModelConfiguration, kinds: readonly LayerKind[]) => Json;
	readonly describes: (configuration: LanguageModelConfiguration) => boolean;
}

interface DepthNames {
	/** In front of the names. */
	readonly own: string;
	readonly layer: string;
	readonly names: Readonly<Record<"enorm" | "hnorm" | "eh_proj" | "final_layernorm", string>>;
}

const silu: Json = { hidden_act: "silu" };

/** Sizes and their defaults in most classes of transformers; null: as the rule says. */
const sizes = {
	hidden_size: 4096,
	intermediate_size: null,
	num_hidden_layers: null,
	num_attention_heads: null,
	num_key_value_heads: null,
	vocab_size: null,
} as const;

/** More layers than any model has; bounds the names that a config.json can ask for. */
const mostLayers = 2048;

export function decoderFamily(rules: DecoderRules): Family {
	const { modelType, architecture, activation = "swiglu" } = rules;
	const read = (json: Json, path: string) => readDecoder(rules, json, path);
	return {
		modelType,
		title: architecture.replace(/ForCausalLM$/, ""),
		embedding: "embed_tokens.weight",
		blocks: 2,
		read,
		missing: (json) => new Set(Object.keys(sizes).filter((name) => json[name] === undefined)),
		describes: (c) =>
			kindsOf(rules, c) !== null &&
			c[activation] &&
			isGated(c) === (rules.gatedDelta !== undefined) &&
			rules.describes(c),
		write: (configuration, dtype, path) =>
			readAlike(writeDecoder(rules, configuration, dtype), configuration, path, { title: architecture, read }),
		detect: (names) => {
			const spelling = detectDecoder(names, rules.gatedDelta ?? null);
			return spelling && { ...spelling, family: modelType };
		},
		spelling: { family: modelType, base: "model.", head: "", experts: "separate" },
		...(rules.ahead && { ahead: rules.ahead }),
		requireCounts: requireDecoderCounts,
		addNames: (...names) => addDecoderNames(rules, ...names),
	};
}

/** The kinds of every layer's second block; null: the model's layers are no such pairs. */
function kindsOf(rules: DecoderRules, { hybridLayerPattern }: LanguageModelConfiguration): LayerKind[] | null {
	const { mixer = "attention", ahead: depths } = rules;
	const { segments, mtp } = parsePattern(hybridLayerPattern);
	const layers = segments.flat(2);
	const mixes = (kind: LayerKind) => kind === mixer || (mixer === "attention" && kind === "gdn");
	const paired = layers.every((kind, at) => (at % 2 === 0 ? mixes(kind) : kind === "mlp" || kind === "moe"));
	const ahead = mtp === null || (depths !== undefined && symbolsOf(mtp.layers) === layerAhead(rules));
	return ahead && paired && layers.length % 2 === 0 ? layers.filter((_, at) => at % 2 === 1) : null;
}

/** The layer of a prediction depth, in letters. */
function layerAhead({ mixer = "attention", hasExperts }: DecoderRules): string {
	return symbolsOf([mixer, hasExperts ? "moe" : "mlp"]);
}

/** Whether the mixers are those of Qwen3-Next. */
function isGated(c: LanguageModelConfiguration): boolean {
	return hasLayer(c.hybridLayerPattern, "gdn") || c.attentionOutputGate === true;
}

/**
 * The windows of attention layers (docs/spec/families.md §2.3), by layer_types or, where config.json has none, by the family's rule.
 * `size`: sliding_window, null: no layer has one.
 */
export function readWindows(
	{ layer_types: types }: Json,
	bad: Refuse,
	layers: number,
	{ size, rule }: { readonly size: number | null; readonly rule: (layer: number) => boolean },
): Required<Pick<LanguageModelConfiguration, "windowSize" | "windowAttnSkipFreq">> {
	const named = (types ?? null) === null ? null : [types].flat();
	if (named !== null && named.length !== layers)
		bad(`layer_types names ${named.length} layers, and the model has ${layers}`);
	const allowed: readonly unknown[] = size === null ? [full] : [full, sliding];
	const unknown = named?.findIndex((type) => !allowed.includes(type)) ?? -1;
	if (unknown >= 0) {
		bad(`layer_types[${unknown}] is ${JSON.stringify(named![unknown])}, and only ${allowed.join(" and ")} can be read`);
	}
	const windowed = Array.from({ length: layers }, (_, layer) => (named ? named[layer] === sliding : rule(layer)));
	if (size === null || !windowed.includes(true)) return { windowSize: null, windowAttnSkipFreq: null };
	// Layer i is layers 2i and 2i + 1 here.
	const skip = windowed.flatMap((one) => [Number(one), Number(one)]);
	return { windowSize: [size - 1, 0], windowAttnSkipFreq: skip.includes(0) ? skip : null };
}

const [full, sliding] = ["full_attention", "sliding_attention"] as const;

/** sliding_window and layer_types of a model's windows. */
export function writtenWindows(c: LanguageModelConfiguration): Json {
	const windowed = windowedLayers(c)?.filter((_, index) => index % 2 === 0);
	return {
		sliding_window: keysOfWindow(c.windowSize),
		layer_types: Array.from({ length: c.numLayers / 2 }, (_, layer) => (windowed?.[layer] === 0 ? full : sliding)),
	};
}

function readDecoder(rules: DecoderRules, json: Json, path: string): LanguageModelConfiguration {
	const bad = refusalAt(path);
	const absent = Object.entries(rules.defaults ?? {}).filter(([name]) => (json[name] ?? null) === null);
	const values: Json = { ...json, ...Object.fromEntries(absent) };
	for (const [name, only] of Object.entries({ ...(rules.activationField ?? silu), ...rules.only })) {
		const value = values[name] ?? only;
		if (value !== only)
			bad(`${name} is ${JSON.stringify(value)}, this program's model has only ${JSON.stringify(only)}`);
	}
	const size = (name: keyof typeof sizes, missing: number) => whole(values, name, rules.sizes[name] ?? missing, bad);
	const [hidden, heads] = [size("hidden_size", sizes.hidden_size), size("num_attention_heads", 1)];
	const groups = size("num_key_value_heads", heads);
	if (heads % groups !== 0) bad("num_attention_heads is not a multiple of num_key_value_heads");
	const derived = typeof rules.headDim === "number" ? rules.headDim : hidden / heads;
	// Latent attention has sizes of its own.
	const unused = rules.mixer === "latentAttention" ? Math.ceil(derived) : derived;
	const headDim = rules.headDim === "derived" ? unused : whole(values, "head_dim", derived, bad);
	if (!Number.isSafeInteger(headDim)) bad(`hidden_size is ${hidden}, no multiple of num_attention_heads (${heads})`);
	const vocabulary = size("vocab_size", 1);
	const layers = size("num_hidden_layers", 1);
	if (layers > mostLayers) bad(`num_hidden_layers is ${layers}, at most ${mostLayers} are read`);
	const { mixer = "attention" } = rules;
	const linear = rules.linearAttention?.(values, bad, layers);
	const pairs = Array.from({ length: layers }, (_, layer): readonly LayerKind[] => [
		linear?.[layer] ? "gdn" : mixer,
		rules.hasExperts?.(values, layer) ? "moe" : "mlp",
	]);
	const { ahead } = rules;
	const depths = ahead ? count(values, ahead.field, 0, bad) : 0;
	if (ahead && depths > ahead.most)
		bad(`${ahead.field} is ${depths}, at most ${counted(ahead.most, "depth")} can be read`);
	return {
		...familyDefaults,
		// Of layers that these models may lack.
		...{ mambaNumHeads: 8, numExperts: 0, moeFfnHiddenSize: 1, rotaryBaseLocal: null },
		positionEmbeddingType: "rope",
		...activationKeys(rules.activation ?? "swiglu"),
		hybridLayerPattern: symbolsOf(pairs.flat()) + `/${layerAhead(rules)}`.repeat(depths),
		numLayers: 2 * layers,
		hiddenSize: hidden,
		ffnHiddenSize: size("intermediate_size", 1),
		numAttentionHeads: heads,
		numQueryGroups: groups,
		kvChannels: headDim,
		vocabSize: vocabulary,
		maxPositionEmbeddings: whole(values, "max_position_embeddings", rules.maxPositionEmbeddings, bad),
		normEpsilon: fraction(values, "rms_norm_eps", 1e-6, bad),
		initMethodStd: fraction(values, "initializer_range", 0.02, bad),
		attentionDropout: fraction(values, "attention_dropout", 0, bad),
		untieEmbeddingsAndOutputWeights: values.tie_word_embeddings !== true,
		embeddingPaddingIdx: readPadding(values.pad_token_id ?? null, vocabulary, bad),
		...readPositions(rules.positions?.(values, bad) ?? values, bad),
		...rules.read(values, bad, layers),
	};
}

/** The token whose embedding gets no gradient; PyTorch counts a negative one from the end of the vocabulary. */
function readPadding(id: unknown, vocabulary: number, bad: Refuse): number | null {
	if (id === null) return null;
	if (!Number.isSafeInteger(id)) return bad(`pad_token_id is ${JSON.stringify(id)}, expected a token or null`);
	return (id as number) < 0 ? vocabulary + (id as number) : (id as number);
}

function writeDecoder(rules: DecoderRules, c: LanguageModelConfiguration, dtype: string): Record<string, unknown> {
	const kinds = kindsOf(rules, c)!;
	return {
		architectures: [rules.architecture],
		model_type: rules.modelType,
		...(rules.activationField ?? silu),
		hidden_size: c.hiddenSize,
		intermediate_size: c.ffnHiddenSize,
		num_hidden_layers: kinds.length,
		num_attention_heads: c.numAttentionHeads,
		num_key_value_heads: c.numQueryGroups,
		...(rules.headDim !== "derived" && { head_dim: c.kvChannels }),
		vocab_size: c.vocabSize,
		max_position_embeddings: c.maxPositionEmbeddings,
		rms_norm_eps: pythonFloat(c.normEpsilon),
		initializer_range: pythonFloat(c.initMethodStd),
		attention_dropout: pythonFloat(c.attentionDropout),
		...writtenPositions(c),
		tie_word_embeddings: !c.untieEmbeddingsAndOutputWeights,
		pad_token_id: c.embeddingPaddingIdx ?? null,
		...rules.only,
		...rules.write(c, kinds),
		...(rules.ahead && { [rules.ahead.field]: c.hybridLayerPattern.split("/").length - 1 }),
		torch_dtype: dtype,
	};
}
