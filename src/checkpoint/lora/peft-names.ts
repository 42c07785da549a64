/**
 * Names of adapters in PEFT's files: `base_model.model.`, the module's name in the Hugging Face model, `.lora_A.weight` or
 * `.lora_B.weight`. They follow from where the weights' values lie in a Hugging Face folder: rows of a weight that go to
 * several modules, as those of linear_qkv, take their rows of B with them, and each of the modules has a whole A. PEFT trains
 * an A of each module; its folders are read as adapters in which these A stand one above the other.
 */

import { languageModelPrefix } from "../../models/hybrid/layer-numbering.ts";
import { adapterName } from "../../models/hybrid/lora.ts";
import { UserError } from "../../system/errors.ts";
import type { LanguageModelConfiguration } from "../hf/configuration.ts";
import type { Spelling } from "../hf/families/family.ts";
import { languageCorrespondence } from "../hf/families/index.ts";
import { parsePythonJson } from "../hf/json.ts";
import { type SpellingName, spellings } from "../hf/language-names.ts";
import { CorrespondenceBuilder, type Link } from "../mapping.ts";

const peftPrefix = "base_model.model.";

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

/** The base that adapters are for, as far as it decides the names of its modules. */
export interface AdaptedBase {
	/** Names of the base's tensors; null: there is no base. */
	readonly stored: Spelling | null;
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
export function moduleSpelling(base: AdaptedBase, names: SpellingName | null = null): Spelling {
	const stored: Spelling = base.stored ?? spellings.published;
	const place = stored.base.replace(/(backbone|model)\.$/, "");
	const inside = base.stored === null && base.whole ? languageModelPrefix : place;
	const ownCode = base.configText !== null && "auto_map" in parsePythonJson(base.configText, "config.json");
	const chosen = stored.family ? null : (names ?? (inside === "" || ownCode ? null : "transformers"));
	if (chosen === null) return { ...stored, base: inside + stored.base.slice(place.length), head: inside };
	return { ...stored, ...spellings[chosen], base: inside + spellings[chosen].base, head: inside };
}

/** The module of a tensor of a PEFT file. */
export const moduleOf = (name: string) => name.slice(peftPrefix.length).replace(/\.lora_[AB]\.weight$/, "");

/**
 * `weights`: logical names of the weights that have adapters. `path` is for errors. `share`: whether modules that are rows
 * of one weight have one A; where they do not, the weight's adapter is as many times as high as it has modules.
 */
export function peftCorrespondence(
	weights: Iterable<string>,
	rank: number,
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	path: string,
	share: (modules: readonly string[]) => boolean = () => true,
): PeftCorrespondence {
	const builder = new CorrespondenceBuilder(path);
	const copies: CopiedMatrix[] = [];
	const names: string[] = [];
	const modulesOf = adaptedModules(configuration, spelling, path);
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

/** The modules of a weight by its logical name. */
function adaptedModules(configuration: LanguageModelConfiguration, spelling: Spelling, path: string) {
	const base = languageCorrespondence(configuration, spelling, path);
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
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	path: string,
): string[] {
	const { links } = languageCorrespondence(configuration, spelling, path);
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
 * Detects the spelling of a PEFT file's modules from its tensor names; null: of no family. MTP depths (`mtp.layers.N`)
 * are beside the layers, under a prefix of their own.
 */
export function peftSpelling(names: Iterable<string>): Spelling | null {
	let base: string | null = null;
	let mtp: string | null = null;
	let decoder = false;
	for (const name of names) {
		const [, place, module] = /^base_model\.model\.(.*?)layers\.\d+\.(mixer|self_attn|mlp)\./.exec(name) ?? [];
		if (place === undefined) continue;
		if (/(^|\.)mtp\.$/.test(place)) mtp = place.replace(/mtp\.$/, "");
		else base = place;
		decoder ||= module !== "mixer";
	}
	if (base === null && mtp === null) return null;
	const own = base ?? spellings.published.base;
	const ahead = mtp ? { mtp } : {};
	// Names of all families of two blocks a layer are the same.
	const family = decoder ? { family: "llama" } : {};
	return { ...family, base: own, head: own.replace(/(backbone|model)\.$/, ""), experts: "separate", ...ahead };
}

/** A regular expression of Python's that matches the modules' whole names and no others of the model. */
export function targetExpression(modules: readonly string[]): string {
	const kinds = modules.map((module) =>
		module
			.replace(/^.*?layers\.\d+\./, "")
			.replaceAll(".", "\\.")
			.replace(/\\\.\d+\\\./, "\\.\\d+\\."),
	);
	return `.*\\.layers\\.\\d+\\.(${[...new Set(kinds)].sort().join("|")})`;
}
