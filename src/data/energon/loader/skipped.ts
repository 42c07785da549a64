/**
 * Reports failing samples, counts them and writes them to a file; too many end the run (docs/spec/energon.md §1.9).
 */
import { mkdirSync } from "node:fs";
import { dirname } from "node:path";
import { appendText } from "../../../observe/record-files.ts";
import { UserError } from "../../../system/errors.ts";
import { fileError } from "../../../system/system-errors.ts";
import { type ErrorHandler, ExpectedLoss, raiseError } from "../errors.ts";
import type { RawRecord, Sample } from "../sample.ts";
import type { SkippedSample } from "./thread.ts";

/** A handler that ends the run at the first damaged sample. */
export function raising(report: ErrorHandler): ErrorHandler {
	return (error, ...rest) => (error instanceof ExpectedLoss ? report : raiseError)(error, ...rest);
}

/** A handler that reports failures and continues. */
export function reporting(
	where: { readonly rank: number; readonly worker: number },
	report: (skipped: SkippedSample) => void,
): ErrorHandler {
	return (error, sample, sources) => {
		const named = sources.map(({ datasetPath, shardName }, i) => ({
			dataset: datasetPath,
			shard: shardName,
			key: keysOf(sample)[i] ?? keysOf(sample)[0] ?? "",
		}));
		const expected = error instanceof ExpectedLoss;
		report({ ...where, reason: error.message, expected, samples: named.length > 0 ? named : rawSamples(sample) });
	};
}

function keysOf(sample: unknown): string[] {
	if (Array.isArray(sample)) return sample.flatMap(keysOf);
	const { key } = (sample ?? {}) as Partial<Sample>;
	return key === undefined ? [] : [key];
}

function rawSamples(sample: unknown): SkippedSample["samples"] {
	const data = (sample as Partial<RawRecord> | null)?.data ?? [];
	return data.flatMap((raw) =>
		raw === null ? [] : [{ dataset: raw.sources[0]?.datasetPath ?? "", shard: raw.shard, key: raw.key }],
	);
}

/** Writes skipped samples as lines of JSON, and ends the run when their number exceeds a budget. */
export class SkipLog {
	/** Number of skipped samples of the data ranks for which `reportsSkipped` is true. */
	#reported = 0;
	/** Number of damaged samples of all data ranks that this process reads. */
	#damaged = 0;

	constructor(
		/** File to append to; null: no file. */
		private readonly path: string | null,
		/** Most damaged samples that this process may skip. */
		private readonly budget: number,
		/** Whether this process reports the skipped samples of a data rank. */
		private readonly reportsSkipped: (rank: number) => boolean,
		/** Called with the reason if a sample cannot be written; the sample still counts. */
		private readonly onUnwritten: (sentence: string) => void,
	) {
		if (path === null) return;
		try {
			mkdirSync(dirname(path), { recursive: true });
		} catch (error) {
			throw fileError("make", dirname(path), error);
		}
	}

	get count(): number {
		return this.#reported;
	}

	/** Returns whether `reportsSkipped` is true for the sample's data rank. */
	add(skipped: SkippedSample): boolean {
		const samples = Math.max(1, skipped.samples.length);
		const reports = this.reportsSkipped(skipped.rank);
		if (reports) this.#reported += samples;
		if (!skipped.expected) this.#damaged += samples;
		if (reports && this.path !== null) this.#write(this.path, `${JSON.stringify(skipped)}\n`);
		if (this.#damaged > this.budget) {
			const where = this.path === null ? "" : ` ${this.path} lists them.`;
			throw new UserError(
				`${this.#damaged} samples were skipped on data rank ${skipped.rank}, more than the budget of ${this.budget}; the last failure: ${skipped.reason}${where}`,
			);
		}
		return reports;
	}

	#write(path: string, line: string): void {
		try {
			appendText(path, line);
		} catch (error) {
			this.onUnwritten(fileError("write", path, error).message);
		}
	}
}
