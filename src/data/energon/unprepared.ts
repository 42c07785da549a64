/** Error messages for paths that are not prepared data sets, with a remedy. */
import { readdirSync, type Stats, statSync } from "node:fs";
import { fileKind } from "../../config/file-kind.ts";
import { UserError } from "../../system/errors.ts";
import { importLine } from "../import/detect.ts";
import { isUrl } from "./storage/storage.ts";

const readable = "mimo reads prepared folders of tar files, .jsonl files and metadatasets (docs/data.md)";
const asText = "--dataset-provider text trains on its text alone";

/** The error about a path that is not a prepared data set. */
export function unprepared(path: string): UserError {
	return new UserError(`${reasonOf(path)}.`);
}

function reasonOf(path: string): string {
	const prepared = `${path} is not a prepared data set: run \`mimo data prepare ${path}\` first`;
	if (isUrl(path)) return `${path} is not a prepared data set: it has no .nv-meta/.info.json`;
	const stat = statusOf(path);
	if (stat === undefined) return `${path} does not exist`;
	const line = importLine(path);
	const fix = line === null ? readable : `${line} makes a data set of it`;
	if (stat.isDirectory()) return holdsTars(path) ? prepared : `${path} is ${folderKind(path)}; ${fix}`;
	if (!stat.isFile()) return `${path} is neither a file nor a folder`;
	const kind = fileKind(path);
	if (kind === null) return `${path} is a file of text, not of samples with images; ${readable}, and ${asText}`;
	if (kind.name === "a tar file") {
		return `${path} is one tar file: put it into a folder of its own and run \`mimo data prepare FOLDER\` first`;
	}
	const other = line === null ? ": pack its samples into tar files" : "";
	return `${path} is ${kind.name}; ${fix}${kind.isText ? `, and ${asText}` : other}`;
}

/** The status of a path; undefined where no file can have it, as with null bytes or too many characters. */
function statusOf(path: string): Stats | undefined {
	try {
		return statSync(path);
	} catch {
		return undefined;
	}
}

/** Whether there are tar files in a folder or below it. */
function holdsTars(folder: string): boolean {
	for (const _ of new Bun.Glob("**/*.{tar,tgz}").scanSync({ cwd: folder, dot: true })) return true;
	return false;
}

/** The kind of a folder without tar files, by the files in it. */
function folderKind(folder: string): string {
	const names = readdirSync(folder);
	const has = (...wanted: string[]) => wanted.some((name) => names.includes(name));
	const ends = (pattern: RegExp) => names.some((name) => pattern.test(name));
	if (has("dataset_info.json", "dataset_dict.json", "state.json") || ends(/\.arrow$/)) return "a Hugging Face data set";
	if (ends(/\.parquet$/)) return "a folder of Parquet files";
	if (ends(/\.(?:jpe?g|png|webp|gif|bmp|tiff?)$/i)) return "a folder of images";
	if (names.length === 0) return "an empty folder";
	return "a folder without tar files";
}
