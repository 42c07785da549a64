/** Imports data of any known form as an Energon data set: rows → samples → shards. */

import { appendFileSync, existsSync, mkdirSync, statSync, truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { claimFolder } from "../../checkpoint/index.ts";
import type { Images } from "../../native/images.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
import { SampleError } from "../energon/errors.ts";
import { IMPORTED_LOADER, META_FOLDER } from "../energon/format/names.ts";
import { jsonText } from "../energon/format/python-text.ts";
import { LARGEST_SAMPLE } from "../energon/format/tar.ts";
import { defaultPrepareOptions, prepare } from "../energon/prepare/prepare.ts";
import { conversationOf, faultOf } from "../vision-language/conversation.ts";
import { remarkOf } from "../vision-language/pixels.ts";
import type { ImportKind } from "./detect.ts";
import { type FetchOptions, fetchImage, type ImageFile } from "./fetch-image.ts";
import {
	checkSettings,
	type Journal,
	readJournal,
	type SkipLimit,
	type SkippedReason,
	SkippedRows,
	writeJournal,
} from "./journal.ts";
import loader from "./mimo_samples.py" with { type: "text" };
import { openSource, type SourceOptions } from "./open-source.ts";
import { type Draft, readRecord, type SampleRecord } from "./read-record.ts";
import { parts, type Row, SkippedRow, type Source } from "./row.ts";
import { type SamplePart, Shards } from "./shards.ts";

export interface ImportOptions extends FetchOptions, SourceOptions {
	/** The folder of the new data set. */
	readonly output: string;
	/** Shares of train, val and test; null: the parts of the source, else all rows are for training. */
	readonly shares: readonly [number, number, number] | null;
	readonly shardSamples: number;
	readonly shardBytes: number;
	/** Seed of the shuffling; null keeps the order. */
	readonly shuffle: number | null;
	readonly skipLimit: SkipLimit;
	/** Receives progress. */
	readonly report: (line: string) => void;
}

export interface ImportResult {
	readonly rows: number;
	readonly samples: number;
	readonly images: number;
	/** Number of samples and shards of each part with samples. */
	readonly parts: readonly { readonly part: string; readonly samples: number; readonly shards: number }[];
	readonly skipped: readonly SkippedReason[];
	/** Whether an earlier call had completed the import. */
	readonly wasDone: boolean;
}

/** Keys of the configuration that the set says for itself. */
const settings = { "image-decoding": "transformers" };

export const SKIPPED_LIST = "skipped.jsonl";
/** Number of rows whose images are fetched at once. */
const AT_ONCE = 16;
const REPORT_MILLISECONDS = 10_000;

/** Runs or continues an import. Throws UserErrors, after which the same call continues the import. */
export async function importData(options: ImportOptions, images: Images): Promise<ImportResult> {
	readJournal(options.output);
	const { kind, source } = await openSource(options);
	const settings = settingsOf(options, kind, source);
	try {
		mkdirSync(options.output, { recursive: true });
	} catch (error) {
		throw fileError("create", `--output ${options.output}`, error);
	}
	using _ = await claimFolder(options.output, "--output", options.report);
	const journal = readJournal(options.output);
	if (journal !== null) checkSettings(options.output, journal, settings);
	options.report(`${options.paths.join(", ")}: ${source.description} (--from ${kind})`);
	const run = new ImportRun(options, source, settings, journal, images);
	if (run.stage === "rows") await run.rows();
	if (run.stage === "missing") run.prepare();
	return run.result(journal?.stage === "done");
}

function settingsOf(options: ImportOptions, kind: ImportKind, source: Source): Record<string, string> {
	const { columns, table, imageRoot, dataset, shares, shardSamples, shardBytes, shuffle } = options;
	const { decode, privateAddresses } = options;
	return {
		from: kind,
		data: source.identity,
		columns: JSON.stringify(columns),
		...(kind === "csv" ? { table: JSON.stringify(table) } : {}),
		...(dataset === null ? {} : { dataset }),
		"image-root": String(imageRoot),
		"split-ratio": String(shares),
		"shard-samples": String(shardSamples),
		"shard-size": String(shardBytes),
		shuffle: String(shuffle),
		decode: String(decode),
		...(privateAddresses ? { "private-addresses": "true" } : {}),
	};
}

type Outcome = readonly SamplePart[] | SkippedRow;

class ImportRun {
	stage: Journal["stage"];
	#position: number[];
	#rows: number;
	#samples: number;
	#images: number;
	#skippedBytes: number;
	readonly #skipped: SkippedRows;
	readonly #shards: Shards;
	readonly #list: string;
	#isRemarked = false;

	constructor(
		private readonly options: ImportOptions,
		private readonly source: Source,
		private readonly settings: Record<string, string>,
		journal: Journal | null,
		private readonly images: Images,
	) {
		const { output, shardSamples: samples, shardBytes: bytes, shares, shuffle, report } = options;
		this.#list = join(output, SKIPPED_LIST);
		this.stage = journal?.stage ?? "rows";
		this.#position = journal?.position ?? [];
		this.#rows = journal?.rows ?? 0;
		this.#samples = journal?.samples ?? 0;
		this.#images = journal?.images ?? 0;
		this.#skippedBytes = journal?.skippedBytes ?? 0;
		this.#skipped = new SkippedRows(journal?.skipped);
		this.#shards = new Shards(output, { samples, bytes, shares, shuffle }, journal?.shards ?? null);
		if (existsSync(this.#list) && statSync(this.#list).size > this.#skippedBytes) {
			truncateSync(this.#list, this.#skippedBytes);
		}
		if (journal === null) this.#write();
		else if (journal.stage === "rows" && this.#rows > 0) report(`continues behind row ${this.#rows}`);
	}

	#write(): void {
		const { shards, skipped } = { shards: this.#shards.state, skipped: this.#skipped.reasons };
		writeJournal(this.options.output, {
			version: 1,
			settings: this.settings,
			stage: this.stage,
			position: this.#position,
			rows: this.#rows,
			samples: this.#samples,
			images: this.#images,
			shards: JSON.parse(JSON.stringify(shards)) as Journal["shards"],
			skippedBytes: this.#skippedBytes,
			skipped: skipped.map(({ examples, ...rest }) => ({ ...rest, examples: [...examples] })),
		});
	}

	/** Reads the remaining rows. */
	async rows(): Promise<void> {
		let waiting: { readonly row: Row; readonly outcome: Outcome | Promise<Outcome> }[] = [];
		let reported = Date.now();
		let next = this.#rows;
		try {
			for await (const row of this.source.rows(this.#position)) {
				waiting.push({ row, outcome: this.#sampleOf(row, next++) });
				while (waiting.length >= AT_ONCE || (waiting.length > 0 && !(waiting[0]!.outcome instanceof Promise))) {
					const { row: first, outcome } = waiting.shift()!;
					this.#take(first, outcome instanceof Promise ? await outcome : outcome);
				}
				if (Date.now() - reported < REPORT_MILLISECONDS) continue;
				reported = Date.now();
				this.options.report(
					`${counted(this.#rows, "row")}, ${counted(this.#samples, "sample")}, ${this.#skipped.count} skipped`,
				);
			}
			for (const { row, outcome } of waiting) this.#take(row, await outcome);
			waiting = [];
		} catch (error) {
			// Only the first error is thrown; errors of rows that still wait are dropped.
			await Promise.allSettled(waiting.map(({ outcome }) => outcome));
			this.#shards.close();
			throw error;
		}
		if (this.#samples === 0) {
			const why = this.#skipped.reasons[0]?.examples[0] ?? "there are no rows";
			throw new UserError(`No row of ${this.options.paths.join(", ")} becomes a sample: ${why}.`);
		}
		this.#shards.end();
		this.stage = "missing";
		this.#write();
		this.#shards.clean();
	}

	/** The sample of a row; a promise if images are on a server. */
	#sampleOf(row: Row, number: number): Outcome | Promise<Outcome> {
		return attempted(() => {
			if (row.fields instanceof SkippedRow) return row.fields;
			const draft = readRecord(row.fields, row.images, row.folder, this.options.columns);
			const found = draft.images.map((reference) => fetchImage(reference, this.images, this.options));
			const key = String(number).padStart(9, "0");
			const assembled = (files: readonly ImageFile[]) => this.#assembled(key, row, draft, files);
			if (!found.some((image) => image instanceof Promise)) return assembled(found as ImageFile[]);
			return Promise.all(found).then(
				(files) => attempted(() => assembled(files)) as Outcome,
				(error: unknown) => skippedOr(error),
			);
		});
	}

	#assembled(key: string, row: Row, { record }: Draft, files: readonly ImageFile[]): Outcome {
		for (const file of files) {
			const sentence = this.#isRemarked ? null : remarkOf(file, file.name ?? `An image of ${row.where}`);
			if (sentence === null) continue;
			this.options.report(`warning: ${sentence}`);
			this.#isRemarked = true;
		}
		return sampleParts(key, record, files);
	}

	#take(row: Row, outcome: Outcome): void {
		const key = String(this.#rows).padStart(9, "0");
		this.#rows++;
		this.#position = [...row.next];
		if (outcome instanceof SkippedRow) {
			this.#skip(row.where, outcome.message);
			return;
		}
		this.#samples++;
		this.#images += outcome.length - 1;
		if (!this.#shards.add(this.#shards.partOf(row.part), key, outcome)) return;
		this.#shards.sync();
		this.#write();
		this.#shards.clean();
	}

	#skip(where: string, reason: string): void {
		this.#skipped.add(where, reason);
		const line = Buffer.from(`${JSON.stringify({ where, reason })}\n`);
		appendFileSync(this.#list, line);
		this.#skippedBytes += line.length;
		this.#skipped.check(this.options.skipLimit, this.#rows, this.#list);
	}

	/** Indexes the shards. */
	prepare(): void {
		const { report } = this.options;
		writeTypedConfig(this.options.output, settings);
		prepare(this.options.output, {
			...defaultPrepareOptions,
			// Energon's lint wants all three parts, which may be empty.
			splitParts: parts.map((part) => `${part}:${part}-`),
			sampleType: "CrudeWebdataset",
			settings,
			// For readers with cookers of their own.
			datasetYamlName: "crude.yaml",
			forceOverwrite: true,
			report: (line) => {
				if (line.startsWith("warning")) report(line);
			},
		});
		this.stage = "done";
		this.#write();
	}

	result(wasDone: boolean): ImportResult {
		const state = this.#shards.state;
		return {
			rows: this.#rows,
			samples: this.#samples,
			images: this.#images,
			parts: parts
				.filter((part) => state[part].samples > 0)
				.map((part) => ({ part, samples: state[part].samples, shards: state[part].next })),
			skipped: this.#skipped.reasons,
			wasDone,
		};
	}
}

/** The result of a step, or the SkippedRow that the step throws. */
function attempted<Result>(step: () => Result): Result | SkippedRow {
	try {
		return step();
	} catch (error) {
		return skippedOr(error);
	}
}

function skippedOr(error: unknown): SkippedRow {
	if (error instanceof SkippedRow) return error;
	throw error;
}

// Converts a record into a crude sample with a JSON part and image parts, which the reader of training checks.

const noPrompts = { caption: "", ocr: "", classification: "" };

/**
 * Parts of the sample of a record. The name of an image part is the image's format, after a number if there are several images.
 * Throws a SkippedRow for a sample that training would skip or that has no text to learn.
 */
export function sampleParts(key: string, record: SampleRecord, images: readonly ImageFile[]): readonly SamplePart[] {
	const names = images.map(({ extension }, i) => (images.length === 1 ? extension : `${i}.${extension}`));
	const named =
		"texts" in record ? { ...record, images: record.images.map((i) => (i === null ? null : names[i]!)) } : record;
	const fields: Record<string, unknown> = { json: named };
	for (const [i, image] of images.entries()) fields[names[i]!] = image;
	const fault = trainingFault(key, fields);
	if (fault !== null) throw new SkippedRow(fault);
	const parts = [
		...images.map(({ file }, i): SamplePart => [names[i]!, file]),
		["json", Buffer.from(jsonText(named))] as const,
	];
	const bytes = parts.reduce((sum, [, content]) => sum + content.length + 1024, 0);
	if (bytes > LARGEST_SAMPLE) throw new SkippedRow(`it has ${bytes} bytes; a sample has at most ${LARGEST_SAMPLE}`);
	return parts;
}

function trainingFault(key: string, fields: Readonly<Record<string, unknown>>): string | null {
	try {
		const sample = { key, restoreKey: [], sources: [], subflavors: {}, type: "CrudeSample", fields };
		return faultOf(conversationOf(sample, noPrompts));
	} catch (error) {
		if (!(error instanceof SampleError)) throw error;
		return error.message.replace(/^Sample \S+ cannot be trained on: /, "").replace(/\.$/, "");
	}
}

// The files by which Energon's own commands read an imported set: a typed dataset.yaml, and its sample loader in
// Python.

/** Writes the files into the set in `folder`; `settings`: keys of the configuration, under `mimo` among the subflavors. */
function writeTypedConfig(folder: string, settings: Readonly<Record<string, string>>): void {
	const meta = join(folder, META_FOLDER);
	const subflavors = Object.entries(settings).map(([key, value]) => `    ${key}: ${value}\n`);
	const config = `sample_type:
  __module__: megatron.energon
  __class__: InterleavedSample
sample_loader: ${IMPORTED_LOADER}:sample_loader
part_filter: ${IMPORTED_LOADER}:part_filter
subflavors:
  mimo:
${subflavors.join("")}`;
	try {
		mkdirSync(meta, { recursive: true });
		writeFileSync(join(meta, IMPORTED_LOADER), loader);
		writeFileSync(join(meta, "dataset.yaml"), config);
	} catch (error) {
		throw fileError("write", meta, error);
	}
}
