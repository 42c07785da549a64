/**
 * Names of adapters in PEFT's files: `base_model.model.`, the module's name in the Hugging Face model, `.lora_A.weight` or
 * `.lora_B.weight`. They follow from where the weights' values lie in a Hugging Face folder: rows of a weight that go to
 * several modules, as those of linear_qkv, take their rows of B with them, and each of the modules has a whole A. PEFT trains
 * an A of each module; its folders are read as adapters in which these A stand one above the other.
 */

import { languageModelPrefix } from "../../models/language/layer-numbering.ts";
import { adapterName } from "../../models/lora.ts";
import { UserError } from "../../system/errors.ts";
import type { LanguageModelConfiguration, Spelling } from "../hf/families/family.ts";
import { gatedDeltaLayoutOf } from "../hf/families/gated-delta-names.ts";
import { addLanguage } from "../hf/families/index.ts";
import { type SpellingName, spellings } from "../hf/families/nemotron-h-names.ts";
import { parsePythonJson } from "../hf/json.ts";
import { addProjector, type ProjectorSizes, type ProjectorStyle, projectorStyles } from "../hf/projector-names.ts";
import { addTower, publishedTower, type TowerSizes, type TowerSpelling } from "../hf/vision-names.ts";
import { CorrespondenceBuilder, type Link } from "../mapping.ts";

const peftPrefix = "base_model.model.";

/** The sizes of a model that decide names and shapes of its adapters. */
export interface AdaptedModel extends LanguageModelConfiguration {
	/** Tower and projector; absent or null: it has none. A projector that Hugging Face's format has no place for is null. */
	readonly vision?: { readonly tower: TowerSizes; readonly projector: ProjectorSizes | null } | null;
}

/** Names of modules, those of tower and projector too; absent: as published. */
export interface ModuleSpelling extends Spelling {
	readonly tower?: TowerSpelling;
	readonly projector?: ProjectorStyle;
}

/** An A in PEFT's files, and the logical one that it is a copy of. */
export interface CopiedMatrix {
	readonly logical: string;
	readonly foreign: string;
}

export interface PeftCorrespondence {
	/** Correspondence of all adapters; of modules that share an A, with one of its copies. */
	readonly builder: CorrespondenceBuilder;
	/** The further copies of A. */
	readonly copies: readonly CopiedMatrix[];
	/** Names of the modules, without PEFT's prefix, in order. */
	readonly modules: readonly string[];
}

/** A module of a Hugging Face folder that holds rows of an adapter's weight. */
interface AdaptedModule {
	readonly name: string;
	readonly rows: number;
	/** The module's rows of the weight. */
	readonly links: readonly Link[];
}

export const matrixName = (module: string, matrix: "A" | "B") => `${peftPrefix}${module}.lora_${matrix}.weight`;

/** The spelling of a base's tensors from those of its parts. */
export function storedSpelling(
	language: Spelling,
	{ tower, projector }: { readonly tower: TowerSpelling | null; readonly projector: ProjectorStyle | null },
): ModuleSpelling {
	return { ...language, ...(tower && { tower }), ...(projector && { projector }) };
}

/** The base that adapters are for, as far as it decides the names of its modules. */
export interface AdaptedBase {
	/** Names of the base's tensors; null: there is no base. */
	readonly stored: ModuleSpelling | null;
	/** Text of the base's config.json; null: there is no base. */
	readonly configText: string | null;
	/** Whether a model that comes from no base has an encoder beside the language model. */
	readonly whole: boolean;
}

/**
 * The modules of the class that loads the base. A language model alone has those of its tensors, of which PEFT itself renames
 * `backbone` for transformers' class. A whole model's tensors say `backbone` too, but transformers' class has `model` there; a
 * folder with code of its own (auto_map) brings a class with the tensors' names. `names`: given by the user, or null.
 */
export function moduleSpelling(base: AdaptedBase, names: SpellingName | null = null): ModuleSpelling {
	const stored: ModuleSpelling = base.stored ?? spellings.published;
	if (stored.tower?.style === "qwen25" && stored.base === "model.") {
		const tower = { ...stored.tower, prefix: "model.visual." };
		return { ...stored, base: "model.language_model.", head: "", tower, projector: "qwen25Modules" };
	}
	// transformers' classes of LLaVA and InternVL have their parts in `model`, which their files do not say.
	if (stored.family && stored.tower && stored.base === "language_model.model.") {
		const tower = { ...stored.tower, prefix: `model.${stored.tower.prefix}` };
		return { ...stored, base: "model.language_model.", head: "", tower, projector: "modules" };
	}
	const place = stored.base.replace(/(backbone|model)\.$/, "");
	const inside = base.stored === null && base.whole ? languageModelPrefix : place;
	const ownCode = base.configText !== null && "auto_map" in parsePythonJson(base.configText, "config.json");
	const chosen = stored.family ? null : (names ?? (inside === "" || ownCode ? null : "transformers"));
	if (chosen === null) return { ...stored, base: inside + stored.base.slice(place.length), head: inside };
	const vision = { ...stored, ...visionSpellings[chosen] };
	return { ...vision, ...spellings[chosen], base: inside + spellings[chosen].base, head: inside };
}

const visionSpellings = {
	published: { tower: publishedTower, projector: "published" },
	transformers: {
		tower: { prefix: "vision_model.", style: "transformers", classAxis: false },
		projector: "transformers",
	},
} as const satisfies Record<SpellingName, Pick<ModuleSpelling, "tower" | "projector">>;

/** The module of a tensor of a PEFT file. */
export const moduleOf = (name: string) => name.slice(peftPrefix.length).replace(/\.lora_[AB]\.weight$/, "");

/**
 * `weights`: logical names of the weights that have adapters. `path` is for errors. `share`: whether modules that are rows
 * of one weight have one A; where they do not, the weight's adapter is as many times as high as it has modules.
 */
export function peftCorrespondence(
	weights: Iterable<string>,
	rank: number,
	model: AdaptedModel,
	spelling: ModuleSpelling,
	path: string,
	share: (modules: readonly string[]) => boolean = () => true,
): PeftCorrespondence {
	const builder = new CorrespondenceBuilder(path);
	const copies: CopiedMatrix[] = [];
	const names: string[] = [];
	const modulesOf = adaptedModules(model, spelling, path);
	for (const weight of weights) {
		const { modules, inputs, outputs } = modulesOf(weight);
		const own = modules.map(({ name }) => name);
		names.push(...own);
		const [a, b] = [adapterName(weight, "a"), adapterName(weight, "b")];
		const heights = share(own) ? 1 : modules.length;
		builder.addLogical(a, [heights * rank, inputs]);
		builder.addLogical(b, [outputs, heights * rank]);
		if (heights > 1) builder.padded.add(b);
		for (const [index, { name, rows, links }] of modules.entries()) {
			const [foreignA, foreignB] = [matrixName(name, "A"), matrixName(name, "B")];
			if (heights === 1 && index > 0) copies.push({ logical: a, foreign: foreignA });
			else {
				builder.addForeign(foreignA, [rank, inputs]);
				builder.rows({ logical: a, foreign: foreignA, width: inputs, rows: rank, logicalRow: index * rank });
			}
			builder.addForeign(foreignB, [rows, rank]);
			const height = heights === 1 ? 0 : index;
			const place = { logical: b, foreign: foreignB, rank, heights, height };
			for (const link of links) linkRows(builder, link, inputs, place);
		}
	}
	return { builder, copies, modules: names };
}

/** Every weight of the base that may have an adapter, in both spellings. */
function baseCorrespondence(model: AdaptedModel, spelling: ModuleSpelling, path: string): CorrespondenceBuilder {
	const { tower, projector } = { ...visionSpellings.published, ...spelling };
	const builder = new CorrespondenceBuilder(path);
	addLanguage(builder, model, spelling);
	if (model.vision) addTower(builder, model.vision.tower, tower, path);
	if (model.vision?.projector) addProjector(builder, model.vision.projector, projector);
	return builder;
}

/** The modules of a weight by its logical name. */
function adaptedModules(model: AdaptedModel, spelling: ModuleSpelling, path: string) {
	const base = baseCorrespondence(model, spelling, path);
	const links = Map.groupBy(base.links, ({ logical }) => logical);
	return (weight: string) => {
		const shape = base.logical.get(weight);
		if (shape === undefined)
			throw new UserError(`${path}: Hugging Face's format has no place for an adapter of ${weight}.`);
		const byModule = Map.groupBy(links.get(weight)!, ({ foreign }) => foreign);
		const modules = [...byModule].map(([foreign, parts]): AdaptedModule => {
			const name = /^(.*)\.weight$/.exec(foreign)?.[1];
			if (name !== undefined) return { name, rows: base.foreign.get(foreign)![0]!, links: parts };
			throw new UserError(
				`${path}: PEFT has no place for the adapter of ${weight}, because ${foreign} of its base holds all experts of a layer.`,
			);
		});
		return { modules, outputs: shape[0]!, inputs: shape[1]! };
	};
}

/** Logical names of the weights whose modules are among those of a PEFT file. */
export function weightsOf(
	modules: ReadonlySet<string>,
	model: AdaptedModel,
	spelling: ModuleSpelling,
	path: string,
): string[] {
	const { links } = baseCorrespondence(model, spelling, path);
	const found = links.filter(({ foreign }) => modules.has(foreign.replace(/\.weight$/, "")));
	return [...new Set(found.map(({ logical }) => logical))];
}

/** The rows of B that go where a link's rows of the weight, of `inputs` elements, go; into the columns of its height. */
function linkRows(
	builder: CorrespondenceBuilder,
	{ logicalRuns, foreignRuns, count, length }: Link,
	inputs: number,
	place: {
		readonly logical: string;
		readonly foreign: string;
		readonly rank: number;
		readonly heights: number;
		readonly height: number;
	},
): void {
	const { logical, foreign, rank, heights, height } = place;
	const width = heights * rank;
	for (let run = 0; run < count; run++) {
		const [row, foreignRow] = [logicalRuns, foreignRuns].map(({ offset, stride }) => (offset + run * stride) / inputs);
		builder.link({
			logical,
			logicalRuns: { offset: row! * width + height * rank, stride: width },
			foreign,
			foreignRuns: { offset: foreignRow! * rank, stride: rank },
			count: length / inputs,
			length: rank,
		});
	}
}

/**
 * Detects the spelling of a PEFT file's modules from its tensor names; null: of no family, nor of a tower or projector. MTP depths
 * (`mtp.layers.N`) are beside the layers, under a prefix of their own.
 */
export function peftSpelling(names: Iterable<string>): ModuleSpelling | null {
	let base: string | null = null;
	let mtp: string | null = null;
	let decoder = false;
	let apart = false;
	let vision: Pick<ModuleSpelling, "tower" | "projector"> = {};
	for (const name of names) {
		const [, place, module] =
			/^base_model\.model\.(.*?)layers\.\d+\.(mixer|self_attn|linear_attn|mlp)\./.exec(name) ?? [];
		// SigLIP's layers are named as a language model's, within an encoder.
		if (place === undefined || place.endsWith("encoder.")) {
			const found = visionSpelling(moduleOf(name));
			// Qwen's towers have one name of attention; the gated MLP tells Qwen2.5-VL's.
			if (found.tower?.style !== "qwen" || vision.tower === undefined) vision = { ...vision, ...found };
			continue;
		}
		if (/(^|\.)mtp\.$/.test(place)) mtp = place.replace(/mtp\.$/, "");
		else base = place;
		decoder ||= module !== "mixer";
		apart ||= gatedDeltaLayoutOf(name) === "apart";
	}
	if (base === null && mtp === null && Object.keys(vision).length === 0) return null;
	// GLM-4.5V's tower has Qwen2.5-VL's names of modules.
	const glm = vision.projector === "glm" && vision.tower;
	if (glm) vision = { ...vision, tower: { ...glm, style: "glm" } };
	const own = base ?? spellings.published.base;
	const ahead = mtp ? { mtp } : {};
	// Most families of two blocks a layer have Llama's names; Gated DeltaNet's projections differ.
	const family = apart ? { family: "qwen3_5_text" } : decoder ? { family: "llama" } : {};
	const head = own.replace(/(backbone|model)\.$/, "");
	return { ...family, base: own, head, experts: "separate", ...ahead, ...vision };
}

/** The spelling of the tower or the projector that a module belongs to, by the module's name. */
function visionSpelling(module: string): Pick<ModuleSpelling, "tower" | "projector"> {
	const projector = (["published", "transformers", "modules", "qwen", "qwen25Modules", "glm"] as const).find((style) =>
		projectorStyles[style].includes(`${module}.weight` as never),
	);
	if (projector !== undefined) return { projector };
	const [, prefix, container] = /^(.*?)(encoder\.layers?|blocks)\.\d+\./.exec(module) ?? [];
	if (prefix === undefined) return {};
	const siglipOrInternVit = container === "encoder.layers" ? "siglip" : "internvit";
	const radio = container === "blocks" ? "published" : "transformers";
	const qwen = /\.mlp\.(?:gate|up|down)_proj$/.test(module) ? "qwen25" : "qwen";
	const style = prefix.endsWith("visual.") ? qwen : prefix.endsWith("vision_tower.") ? siglipOrInternVit : radio;
	return { tower: { prefix, style, classAxis: style === "internvit" } };
}

/**
 * A regular expression of Python's that matches the modules' whole names and no others of the model. `fused`: also the names
 * without an expert's number, by which peft finds experts that transformers stacks.
 */
export function targetExpression(modules: readonly string[], { fused }: { readonly fused: boolean }): string {
	const escaped = (text: string) => text.replaceAll(".", "\\.");
	const expert = fused ? "(\\.\\d+)?\\." : "\\.\\d+\\.";
	const listed = (all: readonly string[]) => `(${[...new Set(all)].join("|")})`;
	const parts = modules.map((module) => {
		const [, container = "", layer = "", rest = module] =
			/^.*?((?:encoder\.)?layers?|blocks)\.(\d+)\.(.*)$/.exec(module) ?? [];
		return { container, layer, name: escaped(rest).replace(/\\\.\d+\\\./, () => expert) };
	});
	const alternatives = [...Map.groupBy(parts, ({ container }) => container)].map(([container, own]) => {
		const names = listed(own.map(({ name }) => name).sort());
		if (container === "") return names;
		// A tower may have layers that the model does not read, and names of a language model's projections.
		if (container === "layers") return `(?!.*encoder\\.layers).*\\.layers\\.\\d+\\.${names}`;
		return `.*\\.${escaped(container)}\\.${listed(own.map(({ layer }) => layer))}\\.${names}`;
	});
	return alternatives.join("|");
}
