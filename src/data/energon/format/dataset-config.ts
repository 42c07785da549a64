/** `dataset.yaml`, which describes the samples of a WebDataset (docs/spec/energon.md §1.6). */
import { UserError } from "../../../system/errors.ts";
import type { Subflavors } from "../sample.ts";
import { resolvePath, type Storage } from "../storage/storage.ts";
import { type FieldAccess, parseFieldAccess } from "./fields.ts";
import { IMPORTED_LOADER, META_FOLDER } from "./names.ts";
import { type SampleType, sampleTypeNames, sampleTypeOf, sampleTypeOfClass } from "./sample-types.ts";
import { readMap } from "./webdataset.ts";
import { toPlain, YamlFields } from "./yaml.ts";

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
