/** The model of a frozen teacher, whose sizes and layers may be others than the student's (docs/spec/elastic.md §11). */
import { existsSync, statSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import {
	configurationFromHuggingFace,
	openSource,
	parsePythonJson,
	requireFormat,
	type SourceCheckpoint,
} from "../../checkpoint/index.ts";
import { checks } from "../../config/checks/all.ts";
import { hasEncoder } from "../../config/derive.ts";
import { parseFile } from "../../config/file.ts";
import { parsePattern } from "../../config/hybrid-pattern.ts";
import { visionKeys } from "../../config/keys/vision.ts";
import { modelDifferences, modelMakingKeys } from "../../config/same-model.ts";
import { fieldOf, type Key, propertyOf, type TrainingConfiguration } from "../../config/schema.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";

type Description = Readonly<Record<string, unknown>>;

const languageKeys: readonly Key[] = modelMakingKeys.filter((key) => !(key in visionKeys));

/** Most bytes of a config.json. */
const longestConfig = 1e7;

/** The teacher's checkpoint. `named`: the layers that a file names, where the checkpoint does not. */
export function openTeacher(c: TrainingConfiguration, named: unknown): SourceCheckpoint {
	// Groups of the student's pattern say those of a checkpoint without.
	const pattern = typeof named === "string" ? named : c.hybridLayerPattern.includes("[") ? c.hybridLayerPattern : null;
	const path = c.exportKdTeacherLoad!;
	return openSource(path, requireFormat(path, null), {
		...{ optimizer: false, allowFallback: c.allowFallback, visionHeads: null, inert: [], pattern },
		newLayers: { seed: c.seed, sizes: {} },
	});
}

/**
 * The run's configuration with the teacher's model: what its checkpoint says, and over it export-kd-teacher-model-config or, as in
 * Megatron, model_config.yaml in the checkpoint's folder. `c` itself for a teacher of the student's layers and sizes, and where there
 * is no checkpoint to read, as for `mimo verify`. Throws a UserError for a model that cannot teach the student.
 */
export function teacherConfiguration(c: TrainingConfiguration): TrainingConfiguration {
	const path = c.exportKdTeacherLoad!;
	const named = namedModel(c);
	if (named === null && !existsSync(path)) return c;
	const model = { ...c, ...namedAndStored(c, named ?? {}), flextron: false };
	const { segments } = parsePattern(model.hybridLayerPattern);
	const teacher = { ...model, numLayers: segments.flat(2).length, mtpNumLayers: 0 };
	if (modelDifferences({ ...teacher }, { ...c, flextron: false }).length === 0) return c;
	const bad = (sentence: string) => {
		throw new UserError(`The teacher ${path} ${sentence}.`);
	};
	if (teacher.vocabSize !== c.vocabSize) bad(`has ${teacher.vocabSize} tokens, and the student ${c.vocabSize}`);
	if (hasEncoder(c) && teacher.hiddenSize !== c.hiddenSize) {
		bad(`has hidden-size ${teacher.hiddenSize}, and the student's image rows ${c.hiddenSize} columns`);
	}
	for (const check of checks) {
		const complaint = check(teacher);
		if (complaint === null || !languageKeys.includes(complaint.key)) continue;
		const value = teacher[propertyOf(complaint.key) as keyof TrainingConfiguration];
		bad(`has ${complaint.key} ${value}; ${complaint.message}`);
	}
	return teacher;
}

/** The teacher's keys by the file that names them; null: no file does. */
function namedModel(c: TrainingConfiguration): Description | null {
	const standing = join(c.exportKdTeacherLoad!, "model_config.yaml");
	const file = c.exportKdTeacherModelConfig ?? (existsSync(standing) ? standing : null);
	if (file === null) return null;
	if (existsSync(file) && statSync(file).isDirectory()) {
		const config = join(file, "config.json");
		if (!existsSync(config)) throw new UserError(`${file} has no config.json.`);
		return {
			...configurationFromHuggingFace(
				parsePythonJson(readWholeText(config, longestConfig), config) as Description,
				config,
			),
		};
	}
	const { entries, problems } = parseFile(file);
	const [problem] = problems;
	if (problem !== undefined) throw new UserError(`${problem.where}: ${problem.message}.`);
	return Object.fromEntries(
		entries.map(({ key, value }) => {
			const { type } = fieldOf(key);
			if (!v.is(type.schema, value))
				throw new UserError(`${file}: ${key} is ${JSON.stringify(value)}; allowed is ${type.allowed}.`);
			return [propertyOf(key), value];
		}),
	);
}

/** Values of the language model's keys, without pipeline cuts and multi-token prediction. */
function namedAndStored(c: TrainingConfiguration, named: Description): Partial<TrainingConfiguration> {
	const stored = existsSync(c.exportKdTeacherLoad!) ? storedModel(c, named.hybridLayerPattern) : {};
	const said: Record<string, unknown> = { ...stored, ...named };
	for (const key of languageKeys) {
		const property = propertyOf(key);
		// A whole configuration lacks keys that are newer than it, which had their defaults.
		const standing = "modelProvider" in stored ? fieldOf(key).default : undefined;
		if (!(property in said) && standing !== undefined) said[property] = standing;
	}
	const known = Object.entries(said).filter(([property]) => languageKeys.some((key) => propertyOf(key) === property));
	const main = String(said.hybridLayerPattern ?? c.hybridLayerPattern)
		.split("/")[0]!
		.replaceAll("|", "");
	return { ...Object.fromEntries(known), hybridLayerPattern: main };
}

function storedModel(c: TrainingConfiguration, pattern: unknown): Description {
	using source = openTeacher(c, pattern);
	return source.model;
}
