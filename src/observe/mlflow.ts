/**
 * A run in MLflow's file store (FileStore of mlflow 3): ROOT/EXPERIMENT/RUN with meta.yaml, a file of lines
 * "milliseconds value step" for each metric, and a file for each parameter and each tag. Each line is a single write, and
 * meta.yaml is written last, because it makes the run visible. A resumed training appends to its run, after removing the steps
 * that it repeats.
 */
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { basename, dirname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parse, stringify } from "yaml";
import { UserError } from "../system/errors.ts";
import { readWholeFile, readWholeText } from "../system/input-file.ts";
import { systemReason } from "../system/system-errors.ts";
import { appendText, replaceFile, userName } from "./record-files.ts";
import { type Scalar, type ScalarOptions, Scalars } from "./scalars.ts";
import type { EvaluationReport, Observer, RunEvent, StepReport, TimersReport, TrainingStart } from "./step-report.ts";

export interface MlflowOptions extends ScalarOptions {
	/** Root of the store, usually called mlruns. */
	readonly folder: string;
	readonly experiment: string;
	/** null: the name of the folder of checkpoints, else an identifier of the training. */
	readonly runName: string | null;
}

/** RunStatus of mlflow's service.proto. */
const status = { running: 1, finished: 3, failed: 4, killed: 5 } as const;
/** SourceType LOCAL. */
const localSource = 4;
const metaFile = "meta.yaml";
/** Bytes of the largest meta.yaml, and of the largest file of a metric: some thirty million values. */
const LARGEST_META = 2 ** 20;
const LARGEST_METRIC = 2 ** 30;
/** Most characters of a parameter's value in the store. */
const longestParameter = 6000;
const defaultExperiment = "Default";

export class MlflowRun implements Observer {
	readonly #options: MlflowOptions;
	readonly #now: () => number;
	readonly #note: (sentence: string) => void;
	readonly #scalars: Scalars;
	/** Folder of the run; null before it begins. */
	#folder: string | null = null;
	#meta: Readonly<Record<string, unknown>> = {};
	readonly #made = new Set<string>();

	/**
	 * `now`: milliseconds since 1970. `note`: called with a sentence for each damaged experiment of others. Throws a UserError if
	 * the store cannot be written.
	 */
	constructor(options: MlflowOptions, now: () => number = Date.now, note: (sentence: string) => void = () => {}) {
		this.#options = options;
		this.#now = now;
		this.#note = note;
		this.#scalars = new Scalars(options);
		this.#attempt(() => mkdirSync(resolve(options.folder), { recursive: true }));
	}

	begin({ step, training, configuration }: TrainingStart): void {
		this.#attempt(() => {
			const root = resolve(this.#options.folder);
			const experiment = this.#experimentOf(root);
			const run = training.slice(0, 32);
			const folder = join(root, experiment, run);
			this.#folder = folder;
			const known = existsSync(join(folder, metaFile));
			for (const part of ["metrics", "params", "tags", "artifacts"]) mkdirSync(join(folder, part), { recursive: true });
			for (const [key, value] of Object.entries(configuration)) {
				const text = Array.isArray(value) ? value.join(",") : String(value);
				writeFileSync(join(folder, "params", key), text.slice(0, longestParameter));
			}
			if (known) this.#goOn(folder, step);
			else this.#create(folder, { experiment, run, configuration });
		});
	}

	step(report: StepReport): void {
		const scalars = this.#scalars.step(report);
		if (scalars !== null) this.#append(report.iteration, [...scalars.twinned, ...scalars.alone]);
	}

	evaluation(report: EvaluationReport): void {
		this.#append(report.iteration, this.#scalars.evaluation(report));
	}

	timers(report: TimersReport): void {
		this.#append(report.iteration, this.#scalars.timers(report));
	}

	note(): void {}

	event({ kind }: RunEvent): void {
		const ends = { end: status.finished, stop: status.killed, failure: status.failed };
		if (this.#folder === null || !(kind in ends)) return;
		const folder = this.#folder;
		const meta = { ...this.#meta, status: ends[kind as keyof typeof ends], end_time: this.#now() };
		this.#attempt(() => this.#writeMeta(folder, meta));
	}

	close(): void {}

	#create(
		folder: string,
		about: {
			readonly experiment: string;
			readonly run: string;
			readonly configuration: TrainingStart["configuration"];
		},
	): void {
		const { experiment, run, configuration } = about;
		const { save } = configuration;
		const name = this.#options.runName ?? (typeof save === "string" ? basename(resolve(save)) : run.slice(0, 8));
		const tags = {
			"mlflow.runName": name,
			"mlflow.user": userName(),
			"mlflow.source.name": "mimo train",
			"mlflow.source.type": "LOCAL",
		};
		for (const [tag, value] of Object.entries(tags)) writeFileSync(join(folder, "tags", tag), value);
		this.#writeMeta(folder, {
			artifact_uri: pathToFileURL(join(folder, "artifacts")).href,
			deleted_time: null,
			end_time: null,
			entry_point_name: "",
			experiment_id: experiment,
			lifecycle_stage: "active",
			run_id: run,
			run_name: name,
			run_uuid: run,
			source_name: "",
			source_type: localSource,
			source_version: "",
			start_time: this.#now(),
			status: status.running,
			tags: [],
			user_id: userName(),
		});
	}

	#goOn(folder: string, step: number): void {
		const meta = readMeta(join(folder, metaFile));
		const metrics = join(folder, "metrics");
		for (const name of readdirSync(metrics, { recursive: true, encoding: "utf8", withFileTypes: true })) {
			if (name.isFile()) cutMetric(join(name.parentPath, name.name), step);
		}
		this.#writeMeta(folder, { ...meta, status: status.running, end_time: null });
	}

	#writeMeta(folder: string, meta: Readonly<Record<string, unknown>>): void {
		this.#meta = meta;
		replaceFile(join(folder, metaFile), stringify(meta));
	}

	#append(step: number, scalars: readonly Scalar[]): void {
		const folder = this.#folder;
		if (folder === null) return;
		const now = this.#now();
		this.#attempt(() => {
			for (const [name, value] of scalars) {
				const file = join(folder, "metrics", metricName(name));
				if (!this.#made.has(file)) mkdirSync(dirname(file), { recursive: true });
				this.#made.add(file);
				appendText(file, `${now} ${value} ${step}\n`);
			}
		});
	}

	/** Identifier of the experiment with the configured name, which is created if it is missing. */
	#experimentOf(root: string): string {
		const wanted = this.#options.experiment;
		const known = readdirSync(root, { withFileTypes: true }).filter((entry) => entry.isDirectory());
		// The identifier is a hash of the name, so that two runs that begin at once use one experiment.
		const number = BigInt(`0x${createHash("sha256").update(wanted).digest("hex").slice(0, 16)}`);
		const id = wanted === defaultExperiment ? "0" : String(10n ** 17n + (number % (9n * 10n ** 17n)));
		for (const { name } of known) {
			const meta = join(root, name, metaFile);
			if (!existsSync(meta)) continue;
			try {
				if (readMeta(meta).name === wanted) return name;
			} catch (error) {
				if (!(error instanceof UserError) || name === id) throw error;
				this.#note(`An experiment in mlflow-dir is left out: ${error.message}`);
			}
		}
		// A new store needs MLflow's default experiment, which runs of other programs use.
		if (!existsSync(join(root, "0"))) this.#makeExperiment(root, "0", defaultExperiment);
		if (id !== "0") this.#makeExperiment(root, id, wanted);
		return id;
	}

	#makeExperiment(root: string, id: string, name: string): void {
		const folder = join(root, id);
		mkdirSync(folder, { recursive: true });
		const now = this.#now();
		const meta = {
			artifact_location: pathToFileURL(folder).href,
			creation_time: now,
			experiment_id: id,
			last_update_time: now,
			lifecycle_stage: "active",
			name,
		};
		replaceFile(join(folder, metaFile), stringify(meta));
	}

	#attempt(action: () => void): void {
		try {
			action();
		} catch (error) {
			if (error instanceof UserError) throw error;
			const { folder } = this.#options;
			throw new UserError(`mlflow-dir ${folder} cannot be written: ${systemReason(error)}.`);
		}
	}
}

/** The content of a meta.yaml. Throws a UserError that names it. */
function readMeta(path: string): Readonly<Record<string, unknown>> {
	const text = readWholeText(path, LARGEST_META, { followLinks: false });
	let content: unknown;
	try {
		content = parse(text);
	} catch (error) {
		throw new UserError(`${path} is not YAML: ${(error as Error).message.split("\n")[0]!.replace(/:$/, "")}.`);
	}
	if (typeof content === "object" && content !== null) return content as Readonly<Record<string, unknown>>;
	throw new UserError(`${path} describes neither an experiment nor a run of MLflow.`);
}

/** The metric's name with only the characters that the store allows: letters, digits and _ - . space : / */
function metricName(name: string): string {
	return name.replaceAll(/[^\w\-. :/]/g, "_");
}

/** Removes the lines of steps after `step`, which ascend, and an incomplete line. A file without lines is removed. */
function cutMetric(file: string, step: number): void {
	const text = Buffer.from(readWholeFile(file, LARGEST_METRIC, { followLinks: false }).buffer).toString("latin1");
	let kept = 0;
	for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", kept)) {
		const fields = text.slice(kept, end).split(" ");
		if (fields.length !== 3 || !(Number(fields[2]) <= step)) break;
		kept = end + 1;
	}
	if (kept === 0) rmSync(file);
	else if (kept < text.length) truncateSync(file, kept);
}
