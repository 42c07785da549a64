/**
 * Handles failures of samples (docs/spec/energon.md §1.9). Functions of the task encoder run in an error context: a SkipSample
 * drops the sample silently; an error of the program ends the run; any other error goes to the handler, drops the sample and
 * is counted; too many consecutive failures end the run.
 */

import { readdirSync, type Stats, statSync } from "node:fs";
import { fileKind } from "../../config/file-kind.ts";
import { counted } from "../../system/counted.ts";
import { printable, UserError } from "../../system/errors.ts";
import { importLine } from "../import/detect.ts";
import type { SourceInfo } from "./sample.ts";
import { isUrl } from "./storage/storage.ts";

/** Thrown by a task encoder to leave a sample out. */
export class SkipSample extends Error {
	override readonly name = "SkipSample";
}

/** A sample that cannot be read, decoded or encoded; `key` and `part` name it where they are known. */
export class SampleError extends Error {
	override readonly name: string = "SampleError";
	constructor(
		sentence: string,
		readonly key: string | null = null,
		readonly part: string | null = null,
		options?: ErrorOptions,
	) {
		super(printable(sentence), options);
	}
}

/** A sample that a setting leaves out, such as a sample that is too long; it does not count as damaged. */
export class ExpectedLoss extends SampleError {
	override readonly name = "ExpectedLoss";
}

/** A part of a sample that cannot be decoded. */
export class DecodingError extends SampleError {
	override readonly name = "DecodingError";
}

/** A field that the sample lacks. */
export class FieldAccessError extends SampleError {
	override readonly name = "FieldAccessError";
}

/** A sample that cannot be read because its shard or index is damaged or missing. */
export class BrokenSampleError extends SampleError {
	override readonly name = "BrokenSampleError";
	constructor(
		sentence: string,
		readonly source: SourceInfo,
		key: string | null = null,
	) {
		super(sentence, key ?? `sample ${source.index}`);
	}
}

/** A damaged index, which makes the samples that need it unreadable. */
export class DamagedIndexError extends UserError {}

/** The data set, its index or the program is broken; the run ends without a call of the handler. */
export class FatalSampleError extends UserError {
	constructor(sentence: string, options?: ErrorOptions) {
		super(sentence);
		if (options?.cause !== undefined) this.cause = options.cause;
	}
}

/** A read that has taken longer than --data-timeout: the run ends, whatever step reads. */
export class DataTimeoutError extends UserError {}

/** Receives every failure that is not fatal. `sample` is the argument of the failing function. */
export type ErrorHandler = (error: Error, sample: unknown, sources: readonly SourceInfo[]) => void;

/** Receives sentences about samples that are used nevertheless, one for each. */
export type Remark = (sentence: string) => void;

/** Ends the run at the first failure. */
export const raiseError: ErrorHandler = (error) => {
	throw error;
};

/** Whether an error shows a defect of the program rather than of a sample. */
function isProgramError(error: unknown): error is Error {
	if (error instanceof ReferenceError || error instanceof SyntaxError || error instanceof FatalSampleError) return true;
	return error instanceof RangeError && /call stack|out of memory/i.test(error.message);
}

export class ErrorContext {
	#failures = 0;

	constructor(
		/** Name of the step, for messages. */
		private readonly step: string,
		private readonly handler: ErrorHandler,
		/** Consecutive failures that end the run; 0 = unlimited. */
		private readonly tolerance: number,
	) {}

	succeeded(): void {
		this.#failures = 0;
	}

	/** Handles an error that a step threw on `sample`; throws when the run must end. */
	failed(error: unknown, sample: unknown): void {
		if (error instanceof SkipSample) return;
		if (error instanceof DataTimeoutError) throw error;
		if (isProgramError(error)) {
			throw new FatalSampleError(`${describe(sample)}: ${this.step} is broken: ${error.message}`, { cause: error });
		}
		const failure = error instanceof Error ? error : new Error(String(error));
		this.handler(failure, sample, sourcesOf(sample));
		this.#failures++;
		if (this.tolerance > 0 && this.#failures >= this.tolerance) {
			throw new FatalSampleError(
				`${describe(sample)}: ${this.step} failed ${this.#failures} times in a row, last: ${failure.message}`,
				{ cause: failure },
			);
		}
	}
}

/** The sources of a sample, or of the samples of a list. */
export function sourcesOf(sample: unknown): readonly SourceInfo[] {
	if (Array.isArray(sample)) return sample.flatMap(sourcesOf);
	const sources = (sample as { sources?: readonly SourceInfo[] } | null)?.sources;
	return Array.isArray(sources) ? sources : [];
}

function describe(sample: unknown): string {
	if (Array.isArray(sample)) return `${counted(sample.length, "sample")} from ${describe(sample[0])}`;
	const { key, shard } = (sample ?? {}) as { key?: string; shard?: string };
	return key === undefined ? "A sample" : `Sample ${shard === undefined ? "" : `${shard}/`}${key}`;
}

// Error messages for paths that are not prepared data sets, with a remedy.

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
