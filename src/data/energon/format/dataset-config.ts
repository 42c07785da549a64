/** `dataset.yaml`, which describes the samples of a WebDataset (docs/spec/energon.md §1.6). */
import { UserError } from "../../../system/errors.ts";
import { FieldAccessError } from "../errors.ts";
import type { Subflavors } from "../sample.ts";
import { resolvePath, type Storage } from "../storage/storage.ts";
import { IMPORTED_LOADER, META_FOLDER } from "./names.ts";
import { toPlain, YamlFields } from "./python-text.ts";
import { readMap } from "./webdataset.ts";

/** Arguments that a dataset's own file may set; they take precedence over those of the call. */
export interface LoadingOverrides {
	readonly shuffleOverEpochs?: number | null;
	readonly parallelShardIters?: number | null;
	readonly maxSamplesPerSequence?: number | null;
}

export interface DatasetConfig {
	/** Type of the samples; null = crude samples: decoded parts by extension, which a cooker converts. */
	readonly sampleType: SampleType | null;
	/** Source of every field of a typed sample. */
	readonly fields: ReadonlyMap<string, FieldAccess>;
	/** Extensions of the parts to read of a crude sample; null = all. */
	readonly parts: readonly string[] | null;
	readonly subflavors: Subflavors;
	readonly overrides: LoadingOverrides;
}

/** Reads the configuration of a prepared WebDataset; `name` null = dataset.yaml. */
export function readDatasetConfig(storage: Storage, folder: string, name: string | null): DatasetConfig {
	const path = resolvePath(folder, `${META_FOLDER}/${name ?? "dataset.yaml"}`);
	const fields = YamlFields.of(readMap(storage, path), path);
	const overrides = readOverrides(fields);
	const subflavors = (toPlain(fields.optionalMap("subflavors") ?? new Map()) ?? {}) as Subflavors;
	const named = readSampleType(fields, path);
	const isImported = fields.get("sample_loader") === `${IMPORTED_LOADER}:sample_loader`;
	const sampleType = isImported ? null : named;
	for (const name of ["sample_loader", "part_filter"]) {
		if (fields.get(name) == null || isImported || (name === "part_filter" && sampleType === null)) continue;
		throw new UserError(
			`${path} has a ${name} in Python, which mimo cannot run: use field_map, or CrudeWebdataset with a cooker.`,
		);
	}
	const map = fields.optionalMap("field_map");
	let parts: string[] | null = null;
	if (sampleType === null) {
		if (map !== null) throw new UserError(`${path} has a field_map, but crude samples have no fields.`);
		if (!isImported && fields.get("part_filter") != null) parts = fields.strings("part_filter");
	} else if (map === null) {
		throw new UserError(`${path} has no field_map.`);
	}
	const known = sampleType === null ? [] : [...sampleType.required, ...sampleType.optional];
	const access = new Map<string, FieldAccess>();
	for (const [field, source] of map ?? []) {
		if (!known.includes(field)) {
			throw new UserError(`${path}: the field_map has ${field}, but ${sampleType!.name} has ${known.join(", ")}.`);
		}
		if (typeof source !== "string") throw new UserError(`${path}: field_map.${field} is not a string.`);
		access.set(field, parseFieldAccess(source));
	}
	fields.end();
	return { sampleType, fields: access, parts, subflavors, overrides };
}

function readOverrides(fields: YamlFields): LoadingOverrides {
	const overrides: { -readonly [name in keyof LoadingOverrides]: LoadingOverrides[name] } = {};
	if (fields.has("shuffle_over_epochs")) {
		overrides.shuffleOverEpochs = fields.optionalNumber("shuffle_over_epochs");
	}
	if (fields.has("parallel_shard_iters")) {
		overrides.parallelShardIters = fields.optionalNumber("parallel_shard_iters");
	}
	if (fields.has("max_samples_per_sequence")) {
		overrides.maxSamplesPerSequence = fields.optionalNumber("max_samples_per_sequence");
	}
	return overrides;
}

/** The sample type; null = crude. Types of unknown modules are looked up among Energon's own, as Energon does. */
function readSampleType(fields: YamlFields, path: string): SampleType | null {
	fields.get("__module__");
	const className = fields.optionalString("__class__") ?? "StandardWebdatasetFactory";
	if (className === "CrudeWebdataset") return null;
	const old = sampleTypeOfClass(className);
	if (old !== undefined) return old;
	if (className !== "StandardWebdatasetFactory" && className !== "StandardWebdataset") {
		throw new UserError(`${path} has the class ${className}, which Energon does not have.`);
	}
	const nested = fields.optionalMap("sample_type");
	if (nested === null) throw new UserError(`${path} has no sample_type.`);
	const inner = new YamlFields(nested, `sample_type of ${path}`);
	inner.get("__module__");
	const name = inner.string("__class__");
	inner.end();
	if (name === "CrudeSample") return null;
	const type = sampleTypeOf(name);
	if (type !== undefined) return type;
	throw new UserError(`${path} has the sample type ${name}; Energon has ${sampleTypeNames.join(", ")}.`);
}

// Energon's sample types and their fields (docs/spec/energon.md §1.6).

interface SampleType {
	readonly name: string;
	/** Required fields. */
	readonly required: readonly string[];
	readonly optional: readonly string[];
}

const type = (name: string, required: string[], optional: string[] = []): SampleType => ({ name, required, optional });

const ocrFields = ["blocks", "lines", "words", "chars"].flatMap((level) => [
	`${level === "blocks" ? "block" : level}_boxes`,
	`${level === "blocks" ? "block" : level}_text`,
]);

const types: readonly SampleType[] = [
	type("CaptioningSample", ["image", "caption"]),
	type("ImageSample", ["image"]),
	type("ImageClassificationSample", ["image"], ["label", "label_name"]),
	type("InterleavedSample", ["sequence"]),
	type("MultiChoiceVQASample", ["image", "context"], ["choices", "correct_choice_idx"]),
	type("OCRSample", ["image", "text"], [...ocrFields, "block_classes"]),
	type(
		"SimilarityInterleavedSample",
		["images", "texts"],
		["audio", "video", "similarity_matrix", "matched_text_indices"],
	),
	type("TextSample", ["text"]),
	type("VidQASample", ["video", "context"], ["answers", "answer_weights"]),
	type("VQASample", ["image", "context"], ["answers", "answer_weights"]),
	type("VQAOCRSample", ["image", "context", "text"], ["answers", "answer_weights", "words_boxes", "words_text"]),
];

const byName = new Map(types.map((sampleType) => [sampleType.name, sampleType]));

/** The type with a name such as "CaptioningSample"; undefined if Energon lacks it. */
export function sampleTypeOf(name: string): SampleType | undefined {
	return byName.get(name);
}

/** Names of all types, for messages and prompts. */
export const sampleTypeNames: readonly string[] = [...byName.keys()];

/** The sample type of a deprecated `__class__` such as "CaptioningWebdataset". */
function sampleTypeOfClass(name: string): SampleType | undefined {
	return name.endsWith("Webdataset") ? byName.get(name.replace(/Webdataset$/, "Sample")) : undefined;
}

// `field_map` entries such as `txt,json[caption]`, which name the sources of a field of a typed sample
// (docs/spec/energon.md §1.6). A part with `*`, such as `img*.jpg`, selects all matching parts; this is an extension
// of Energon's format.

/** Alternatives, each a path of a part and then keys or list indices. */
type FieldAccess = readonly (readonly string[])[];

const option = /^([^[\]]+)((?:\[[^[\]]+\])*)$/;

export function parseFieldAccess(text: string): FieldAccess {
	return text.split(",").map((alternative) => {
		const match = option.exec(alternative);
		if (!match) return [text];
		return [match[1]!, ...(match[2]!.match(/[^[\]]+/g) ?? [])];
	});
}

/** Whether a part of a `field_map`, perhaps with `*`, matches an extension. */
export function matchesPart(part: string, extension: string): boolean {
	if (!part.includes("*")) return part === extension;
	const pieces = part.split("*");
	const [first, last] = [pieces[0]!, pieces.at(-1)!];
	if (extension.length < first.length + last.length || !extension.startsWith(first)) return false;
	let at = first.length;
	for (const piece of pieces.slice(1, -1)) {
		const found = extension.indexOf(piece, at);
		if (found < 0) return false;
		at = found + piece.length;
	}
	return extension.length - last.length >= at && extension.endsWith(last);
}

/** The value of the first alternative that the sample has. Throws a FieldAccessError if it has no alternative. */
export function accessField(parts: Readonly<Record<string, unknown>>, access: FieldAccess, key: string): unknown {
	for (const path of access) {
		const found = follow(parts, path);
		if (found !== undefined) return found.value;
	}
	const wanted = access.map(([part, ...inner]) => part + inner.map((name) => `[${name}]`).join("")).join(" or ");
	throw new FieldAccessError(`Sample ${key} has no ${wanted}; it has ${Object.keys(parts).join(", ")}.`, key);
}

function follow(root: unknown, path: readonly string[]): { value: unknown } | undefined {
	const [part, ...steps] = path;
	if (part?.includes("*") && steps.length === 0 && isRecord(root)) {
		const names = Object.keys(root).filter((name) => matchesPart(part, name));
		if (names.length === 0) return undefined;
		names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
		return { value: names.map((name) => root[name]) };
	}
	let value = root;
	for (const step of path) {
		if (Array.isArray(value)) {
			const index = /^[+-]?\d+$/.test(step) ? Number(step) : Number.NaN;
			value = value[index < 0 ? value.length + index : index];
			if (value === undefined) return undefined;
		} else if (isRecord(value) && Object.hasOwn(value, step)) {
			value = value[step];
		} else {
			return undefined;
		}
	}
	return { value };
}

/** Whether a value has fields; undecoded bytes have no fields. */
function isRecord(value: unknown): value is Record<string, unknown> {
	return value !== null && typeof value === "object" && !ArrayBuffer.isView(value);
}
