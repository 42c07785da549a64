/** Detects the form of the data at a path from file names and first bytes. */
import { type Stats, statSync } from "node:fs";
import { basename, join } from "node:path";
import { CryptoHasher } from "bun";
import { fileKind } from "../../config/file-kind.ts";
import { configLimits, readJsonText } from "../../system/json.ts";
import { fileError } from "../../system/system-errors.ts";
import { byPathParts, META_FOLDER } from "../energon/format/names.ts";
import type { Part } from "./row.ts";

/** Forms that can be imported, with their names in messages. */
export const importKinds = {
	pictures: "a folder of pictures with .txt or .json files beside them, or in folders of their classes",
	csv: "a table (CSV or TSV)",
	json: "JSON records",
	parquet: "Parquet files",
	arrow: "a Hugging Face data set written by save_to_disk",
	tar: "tar files of samples (webdataset, img2dataset)",
	"llama-factory": "a LLaMA-Factory folder with a dataset_info.json",
} as const;
export type ImportKind = keyof typeof importKinds;

export interface InputFile {
	readonly path: string;
	/** Part of the data set that the source names for the file; null: no part. */
	readonly part: Part | null;
}

export interface Detected {
	readonly kind: ImportKind;
	/** Files in the order of reading; the folder for pictures. */
	readonly files: readonly InputFile[];
}

/** Suffixes of image files, also of formats that cannot be read, so that messages name such files. */
const pictureSuffix = /\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif|heic|jp2)$/i;

export function isPictureName(name: string): boolean {
	return pictureSuffix.test(name);
}

const suffixKinds: Readonly<Record<string, ImportKind>> = {
	csv: "csv",
	tsv: "csv",
	json: "json",
	jsonl: "json",
	ndjson: "json",
	parquet: "parquet",
	arrow: "arrow",
	tar: "tar",
};

/** Number of file names among which a folder of pictures has to have a picture. */
const LOOKED_AT = 100_000;

/** Form and files of the data at a path; null: no known form. `forced`: the form, which is not detected then. */
export function detect(path: string, forced: ImportKind | null = null): Detected | null {
	const stat = statusOf(path);
	if (stat === undefined) return null;
	if (stat.isFile()) {
		const kind = forced ?? kindOfFile(path);
		return kind === null || kind === "pictures" ? null : { kind, files: [{ path, part: null }] };
	}
	return stat.isDirectory() ? detectFolder(path, forced) : null;
}

/** The form of a file, by its first bytes, else by its suffix. */
function kindOfFile(path: string): ImportKind | null {
	const kind = fileKind(path);
	if (kind !== null && !kind.isText) {
		const binary: Readonly<Record<string, ImportKind>> = {
			"a Parquet file": "parquet",
			"an Arrow file": "arrow",
			"a tar file": "tar",
		};
		return Object.hasOwn(binary, kind.name) ? binary[kind.name]! : null;
	}
	const suffix = suffixOf(path);
	return Object.hasOwn(suffixKinds, suffix) ? suffixKinds[suffix]! : null;
}

function suffixOf(name: string): string {
	return /\.([A-Za-z0-9]+)$/.exec(name)?.[1]?.toLowerCase() ?? "";
}

function statusOf(path: string): Stats | undefined {
	try {
		return statSync(path);
	} catch {
		return undefined;
	}
}

/** Forms by the files in a folder, in order of precedence. */
const folderForms: readonly (readonly [kind: ImportKind, glob: string])[] = [
	["arrow", "**/*.arrow"],
	["tar", "**/*.tar"],
	["parquet", "**/*.parquet"],
	["json", "**/metadata.jsonl"],
	["csv", "**/metadata.csv"],
];
const looseForms: readonly (readonly [kind: ImportKind, glob: string])[] = [
	["json", "**/*.{jsonl,ndjson}"],
	["csv", "**/*.{csv,tsv}"],
	["json", "**/*.json"],
];

function detectFolder(folder: string, forced: ImportKind | null): Detected | null {
	if ((forced ?? "arrow") === "arrow") {
		const saved = savedToDisk(folder);
		if (saved !== null) return { kind: "arrow", files: saved };
	}
	const info = join(folder, "dataset_info.json");
	if ((forced ?? "llama-factory") === "llama-factory" && describesFiles(info)) {
		return { kind: "llama-factory", files: [{ path: info, part: null }] };
	}
	const found = (forms: typeof folderForms): Detected | null => {
		for (const [kind, glob] of forms) {
			if (forced !== null && kind !== forced) continue;
			const files = filesOf(folder, glob);
			if (files.length > 0) return { kind, files };
		}
		return null;
	};
	if (forced === "pictures") return { kind: "pictures", files: [{ path: folder, part: null }] };
	const certain = found(folderForms);
	if (certain !== null) return certain;
	if (forced === null && holdsPictures(folder)) return { kind: "pictures", files: [{ path: folder, part: null }] };
	return found(looseForms);
}

/** Files below a folder in the order of their paths, without hidden files, `.nv-meta` and caches of the `datasets` package. */
function filesOf(folder: string, glob: string): InputFile[] {
	return [...new Bun.Glob(glob).scanSync({ cwd: folder })]
		.filter((name) => !name.startsWith(`${META_FOLDER}/`) && !/(?:^|\/)cache-[^/]*\.arrow$/.test(name))
		.sort(byPathParts)
		.map((name) => ({ path: join(folder, name), part: partOf(name) }));
}

function holdsPictures(folder: string): boolean {
	let looked = 0;
	for (const name of new Bun.Glob("**/*").scanSync({ cwd: folder })) {
		if (isPictureName(name)) return true;
		if (++looked >= LOOKED_AT) return false;
	}
	return false;
}

const partNames: Readonly<Record<string, Part>> = {
	train: "train",
	training: "train",
	val: "val",
	valid: "val",
	validation: "val",
	dev: "val",
	eval: "val",
	test: "test",
};

/** The part that a path names by Hugging Face's conventions, such as `validation-00000-of-00002.parquet` or `test/0.parquet`. */
export function partOf(path: string): Part | null {
	const words = path
		.toLowerCase()
		.split("/")
		.slice(-2)
		.map((name) => /^[a-z]+(?=[-_.\d]|$)/.exec(name)?.[0] ?? "");
	const known = words.reverse().find((word) => Object.hasOwn(partNames, word));
	return known === undefined ? null : partNames[known]!;
}

/** Files of a folder that `save_to_disk` wrote, for a data set or for its splits; null for another folder. */
function savedToDisk(folder: string): InputFile[] | null {
	const splits = jsonIn(join(folder, "dataset_dict.json"))?.splits;
	if (Array.isArray(splits)) {
		return splits
			.filter((name): name is string => typeof name === "string" && !name.includes("/") && name !== "..")
			.flatMap((name) =>
				(savedToDisk(join(folder, name)) ?? []).map(({ path }) => ({ path, part: partOf(`${name}-`) })),
			);
	}
	const files = jsonIn(join(folder, "state.json"))?._data_files;
	if (!Array.isArray(files)) return null;
	return files.flatMap((file: unknown): InputFile[] => {
		const name = (file as { filename?: unknown } | null)?.filename;
		return typeof name === "string" && !name.includes("/") ? [{ path: join(folder, name), part: null }] : [];
	});
}

/** Whether every entry of a dataset_info.json says where data are, as LLaMA-Factory's do; those of the `datasets` package do not. */
function describesFiles(info: string): boolean {
	const places = ["file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"];
	const entries = Object.values(jsonIn(info) ?? {});
	const isEntry = (entry: unknown) =>
		typeof entry === "object" && entry !== null && places.some((place) => Object.hasOwn(entry, place));
	return entries.length > 0 && entries.every(isEntry);
}

/** A small JSON file as an object; null: the file is missing, large, or no JSON object. */
export function jsonIn(path: string): Record<string, unknown> | null {
	try {
		const value: unknown = JSON.parse(readJsonText(path, configLimits));
		return typeof value === "object" && value !== null && !Array.isArray(value) ? { ...value } : null;
	} catch {
		return null;
	}
}

// The command that imports the data at a path.

/** `mimo data import …`, in backquotes; null for data that cannot be imported. */
export function importLine(path: string): string | null {
	if (detect(path) === null) return null;
	return `\`mimo data import ${quoted(path)} --output ${quoted(outputName(path))}\``;
}

/** Name of the output, beside the path: "data/a.csv" → "data/a-set". */
function outputName(path: string): string {
	return `${path.replace(/\/+$/, "").replace(/\.[A-Za-z0-9]+$/, "")}-set`;
}

function quoted(path: string): string {
	return /^[\w./:@%+=,-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}

/** Digest of the names, sizes and times of change of files, in order. */
export function identityOf(files: readonly InputFile[]): string {
	const hash = new CryptoHasher("sha256");
	for (const { path, part } of files) {
		try {
			const { size, mtimeMs } = statSync(path);
			hash.update(JSON.stringify([basename(path), size, mtimeMs, part]));
		} catch (error) {
			throw fileError("open", path, error);
		}
	}
	return hash.digest("hex").slice(0, 16);
}
