/**
 * A run in the form of Weights & Biases' offline client: DIR/wandb/offline-run-TIME-ID with run-ID.wandb, files/ and logs/, which
 * `wandb sync` uploads. The values of a step are a row, written when the next step begins. A resumed training appends to its
 * run, after removing the steps that it repeats.
 */

import { existsSync, mkdirSync, readdirSync, renameSync, rmSync, symlinkSync } from "node:fs";
import { arch, availableParallelism, hostname, release, type } from "node:os";
import { basename, join, resolve } from "node:path";
import { UserError } from "../../system/errors.ts";
import { programVersion } from "../../system/program-version.ts";
import { systemReason } from "../../system/system-errors.ts";
import { replaceFile, userName } from "../record-files.ts";
import { type Scalar, type ScalarOptions, Scalars } from "../scalars.ts";
import type { EvaluationReport, Observer, RunEvent, StepReport, TimersReport, TrainingStart } from "../step-report.ts";
import * as records from "./records.ts";
import { TransactionLog } from "./records.ts";

export interface WandbOptions extends ScalarOptions {
	/** Parent of the folder `wandb`. */
	readonly folder: string;
	/** null: the user's default entity. */
	readonly entity: string | null;
	readonly project: string | null;
	readonly name: string | null;
}

const metadataFile = "wandb-metadata.json";
const idLetters = 8;

/** A run identifier in W&B's form, letters and digits. */
const idOf = (training: string): string => BigInt(`0x${training}`).toString(36).slice(0, idLetters);

/** "20260131_090507", local time. */
function stamp(milliseconds: number): string {
	const date = new Date(milliseconds);
	const two = (value: number) => String(value).padStart(2, "0");
	const day = `${date.getFullYear()}${two(date.getMonth() + 1)}${two(date.getDate())}`;
	return `${day}_${two(date.getHours())}${two(date.getMinutes())}${two(date.getSeconds())}`;
}

export class WandbRun implements Observer {
	readonly #options: WandbOptions;
	readonly #now: () => number;
	readonly #scalars: Scalars;
	#log: TransactionLog | null = null;
	/** Number of the latest record. */
	#number = 0;
	/** Start of the run, which may be before this process, in milliseconds since 1970. */
	#began = 0;
	/** Values of the latest step, which are not written yet. */
	#row: { readonly step: number; readonly at: number; readonly values: Map<string, number> } | null = null;

	/** `now`: milliseconds since 1970. Throws a UserError if the folder cannot be written. */
	constructor(options: WandbOptions, now: () => number = Date.now) {
		this.#options = options;
		this.#now = now;
		this.#scalars = new Scalars(options);
		this.#attempt(() => mkdirSync(join(options.folder, "wandb"), { recursive: true }));
	}

	begin({ step, training, configuration, arguments: given }: TrainingStart): void {
		const { entity, project, name } = this.#options;
		this.#attempt(() => {
			const id = idOf(training);
			const home = join(resolve(this.#options.folder), "wandb");
			const known = readdirSync(home).find((one) => one.startsWith("offline-run-") && one.endsWith(`-${id}`));
			const folder = join(home, known ?? `offline-run-${stamp(this.#now())}-${id}`);
			const file = join(folder, `run-${id}.wandb`);
			for (const part of ["files", "logs"]) mkdirSync(join(folder, part), { recursive: true });
			pointTo(join(home, "latest-run"), folder);
			if (existsSync(file)) {
				this.#goOn(file, step);
				this.#write([records.config(configuration)]);
				return;
			}
			this.#began = this.#now();
			this.#log = TransactionLog.create(file);
			this.#write([
				records.header(`mimo ${programVersion()}`),
				records.run({ id, entity, project, name, host: hostname(), began: this.#began, configuration }),
				this.#environment(given),
				records.file(metadataFile),
			]);
			this.#writeMetadata(folder, given);
		});
	}

	step(report: StepReport): void {
		const scalars = this.#scalars.step(report);
		if (scalars !== null) this.#add(report.iteration, [...scalars.twinned, ...scalars.alone]);
	}

	evaluation(report: EvaluationReport): void {
		this.#add(report.iteration, this.#scalars.evaluation(report));
	}

	timers(report: TimersReport): void {
		this.#add(report.iteration, this.#scalars.timers(report));
	}

	note(): void {}

	event({ kind, sentence }: RunEvent): void {
		if (this.#log === null) return;
		const now = this.#now();
		const ends = kind === "end" || kind === "failure";
		this.#attempt(() => {
			// Otherwise an evaluation may still add to the row.
			if (ends || kind === "stop") this.#flush();
			this.#write([
				records.output(sentence, now),
				...(kind === "stop" ? [records.preempting()] : []),
				...(ends ? [records.exit(kind === "end" ? 0 : 1, (now - this.#began) / 1000)] : []),
			]);
		});
	}

	close(): void {
		this.#attempt(() => {
			this.#flush();
			this.#log?.[Symbol.dispose]();
		});
		this.#log = null;
	}

	/** Reopens the file of a run, with the records of steps up to `step`. */
	#goOn(file: string, step: number): void {
		this.#log = TransactionLog.goOn(file, (bytes) => {
			const record = records.readRecord(bytes, file);
			if (record.kind === "exit" || record.kind === "preempting" || (record.step ?? 0) > step) return false;
			this.#number = record.number;
			this.#began = record.began ?? this.#began;
			return true;
		});
		// The run has to be uploaded again.
		rmSync(`${file}.synced`, { force: true });
	}

	#environment(given: readonly string[]): records.NumberedRecord {
		return records.environment({
			system: `${type()}-${release()}-${arch()}`,
			began: this.#began,
			arguments: given,
			host: hostname(),
			user: userName(),
			executable: process.execPath,
			cores: availableParallelism(),
			writer: crypto.randomUUID(),
		});
	}

	/** Writes wandb-metadata.json, which clients before 0.20 wrote in place of an environment record. */
	#writeMetadata(folder: string, given: readonly string[]): void {
		const metadata = {
			os: `${type()}-${release()}-${arch()}`,
			startedAt: new Date(this.#began).toISOString(),
			args: given,
			program: "mimo",
			host: hostname(),
			username: userName(),
			executable: process.execPath,
			cpu_count_logical: availableParallelism(),
		};
		replaceFile(join(folder, "files", metadataFile), `${JSON.stringify(metadata, null, 2)}\n`);
	}

	#add(step: number, scalars: readonly Scalar[]): void {
		if (this.#log === null || scalars.length === 0) return;
		if (this.#row?.step !== step) {
			this.#attempt(() => this.#flush());
			this.#row = { step, at: this.#now(), values: new Map() };
		}
		for (const [name, value] of scalars) this.#row!.values.set(name, value);
	}

	/** Writes the row of the latest step. */
	#flush(): void {
		const row = this.#row;
		if (row === null) return;
		this.#row = null;
		const values: (readonly [string, number])[] = [
			...row.values,
			["_timestamp", row.at / 1000],
			["_runtime", (row.at - this.#began) / 1000],
			["_step", row.step],
		];
		this.#write([records.history(row.step, values), records.summary(values)]);
	}

	#write(list: readonly records.NumberedRecord[]): void {
		this.#log?.append(list.map((record, i) => record(this.#number + 1 + i)));
		this.#number += list.length;
	}

	#attempt(action: () => void): void {
		try {
			action();
		} catch (error) {
			if (error instanceof UserError) throw error;
			throw new UserError(`wandb-save-dir ${this.#options.folder} cannot be written: ${systemReason(error)}.`);
		}
	}
}

/** Replaces a symbolic link atomically by a link to a folder beside it. */
function pointTo(link: string, folder: string): void {
	const temporary = `${link}.${process.pid}`;
	rmSync(temporary, { force: true });
	symlinkSync(basename(folder), temporary);
	renameSync(temporary, link);
}
