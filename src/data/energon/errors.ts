/**
 * Handles failures of samples (docs/spec/energon.md §1.9). Functions of the task encoder run in an error context: a SkipSample
 * drops the sample silently; an error of the program ends the run; any other error goes to the handler, drops the sample and
 * is counted; too many consecutive failures end the run.
 */
import { counted } from "../../system/counted.ts";
import { printable, UserError } from "../../system/errors.ts";
import type { SourceInfo } from "./sample.ts";

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
