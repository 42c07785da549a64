/** `mimo report`: draws one run's log, or compares several, as an HTML page; or records it for trackers. */
import { writeFileSync } from "node:fs";
import { basename, extname } from "node:path";
import { defineCommand } from "citty";
import { wandbFolder } from "../config/derive.ts";
import { note, warn } from "../observe/messages.ts";
import { MlflowRun } from "../observe/mlflow.ts";
import { comparisonPage, reportPage } from "../observe/page/page.ts";
import { LARGEST_LOG_LINE } from "../observe/run-log/entry.ts";
import { findLog, newRun, type RunLog, readRunLog } from "../observe/run-log/reader.ts";
import { type OpenTracker, Replay } from "../observe/run-log/replay.ts";
import { RunRecords } from "../observe/run-records.ts";
import { type Observer, together } from "../observe/step-report.ts";
import { TensorBoard } from "../observe/tensorboard.ts";
import type { TrackerAnswer } from "../observe/tracker-process.ts";
import { WandbRun } from "../observe/wandb/run.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { linesOf } from "../system/input-file.ts";
import { systemReason } from "../system/system-errors.ts";

/** Keys that say where and under what name a tracker records a run; as flags they are stronger than the logged configuration. */
const trackerKeys = {
	mlflow: ["mlflow-dir", "mlflow-experiment", "mlflow-run-name"],
	wandb: ["wandb-save-dir", "wandb-project", "wandb-exp-name", "wandb-entity"],
	tensorboard: ["tensorboard-dir"],
} as const;
type TrackerName = keyof typeof trackerKeys;

const trackers = Object.keys(trackerKeys) as TrackerName[];
const flags = Object.values(trackerKeys).flat();
const trackerArguments = Object.fromEntries(
	flags.map((key) => [
		key,
		{ type: "string", description: `With --to; default: ${key} of the logged training.` } as const,
	]),
);

export default defineCommand({
	meta: {
		name: "report",
		description: "Draw a run's log, finished or not, as one HTML page; or compare several; or record it for trackers.",
	},
	args: {
		run: {
			type: "positional",
			description:
				"A JSON log (log-json), or a folder with one; several are compared. With --to also -: standard input.",
			valueHint: "RUN…",
			required: true,
		},
		"all-runs": { type: "boolean", description: "Take all runs of a log as one; default: the latest run." },
		to: { type: "string", description: `Trackers to write, joined by commas: ${trackers.join(", ")}.` },
		...trackerArguments,
		output: { type: "string", description: "Page to write; default: the logs' names with .html, in this folder." },
	},
	run: async ({ args }) => {
		if (args.to !== undefined) return await record(args._, args);
		const logs = args._.map((path) => readRunLog(path, { allRuns: args["all-runs"] ?? false }));
		const [first] = logs;
		const names = [...new Set(logs.map(({ file }) => basename(file, extname(file))))];
		const page = args.output ?? `${names.join("-")}.html`;
		const text = logs.length === 1 ? reportPage(first!, Date.now()) : comparisonPage(logs, Date.now());
		try {
			writeFileSync(page, text);
		} catch (error) {
			throw new UserError(`The page ${page} cannot be written: ${systemReason(error)}.`);
		}
		const steps = logs.map((log) => counted(log.steps, "step")).join(" and ");
		note(`${page}: ${steps}, ${(text.length / 1024).toFixed(0)} KiB.`);
		for (const log of logs) noteEarlier(log);
	},
});

function noteEarlier({ earlierRuns, file }: RunLog): void {
	if (earlierRuns === 0) return;
	const runs = earlierRuns === 1 ? "An earlier run" : `${earlierRuns} earlier runs`;
	note(`${runs} of ${file} ${earlierRuns === 1 ? "is" : "are"} left out; --all-runs draws all as one.`);
}

/** Records the run of a log for trackers; `-`: of the lines on standard input, while a training writes them. */
async function record(paths: readonly string[], args: Readonly<Record<string, unknown>>): Promise<void> {
	const names = String(args.to).split(",") as TrackerName[];
	const unknown = names.find((name) => !trackers.includes(name));
	if (unknown !== undefined) {
		throw new UserError(`--to ${unknown}: trackers are ${trackers.join(", ")}.`, exitCodes.usage);
	}
	if (paths.length > 1) throw new UserError("--to records one run.", exitCodes.usage);
	const given = Object.fromEntries(flags.flatMap((key) => (args[key] === undefined ? [] : [[key, args[key]]])));
	const path = paths[0]!;
	const records = path === "-" ? new RunRecords(warn) : null;
	const replay = new Replay((logged, scalars, now) => {
		const configuration = { ...logged, ...given };
		return together(
			names.map((name) => {
				const opened = openTracker[name](configuration, scalars, now);
				return records?.keep(...opened) ?? opened[1];
			}),
		);
	});
	if (records !== null) await follow(replay, records);
	else note(`${path}: ${counted(replayFile(replay, path, args["all-runs"] === true), "line")} recorded.`);
}

type OpenNamed = (...given: Parameters<OpenTracker>) => [name: string, tracker: Observer];

const openTracker: Readonly<Record<TrackerName, OpenNamed>> = {
	mlflow: (c, scalars, now) => {
		const folder = required(c, "mlflow-dir");
		const experiment = textOf(c["mlflow-experiment"]) ?? "Default";
		const runName = textOf(c["mlflow-run-name"]);
		return [`MLflow record in ${folder}`, new MlflowRun({ ...scalars, folder, experiment, runName }, now, note)];
	},
	wandb: (c, scalars, now) => {
		const project = textOf(c["wandb-project"]);
		const folder =
			wandbFolder({ wandbSaveDir: textOf(c["wandb-save-dir"]), wandbProject: project, save: textOf(c.save) }) ??
			required(c, "wandb-save-dir");
		const about = { folder, project, entity: textOf(c["wandb-entity"]), name: textOf(c["wandb-exp-name"]) };
		return [`Weights & Biases record in ${folder}`, new WandbRun({ ...scalars, ...about }, now)];
	},
	tensorboard: (c, scalars, now) => {
		const folder = required(c, "tensorboard-dir");
		return [`TensorBoard record in ${folder}`, new TensorBoard({ ...scalars, folder }, now)];
	},
};

const textOf = (value: unknown): string | null => (typeof value === "string" ? value : null);

function required(configuration: Readonly<Record<string, unknown>>, key: (typeof flags)[number]): string {
	const value = textOf(configuration[key]);
	if (value !== null) return value;
	throw new UserError(`--to needs --${key}: the logged training has none.`, exitCodes.usage);
}

/** Replays the latest run of a log, or all; the number of its lines. */
function replayFile(replay: Replay, path: string, allRuns: boolean): number {
	const file = findLog(path);
	const lines = () => linesOf(file, { limit: LARGEST_LOG_LINE, unended: false });
	let first = 1;
	for (const { number, bytes } of lines()) if (newRun.test(bytes.toString("latin1", 0, 64))) first = number;
	let taken = 0;
	for (const { number, bytes } of lines()) {
		if (number < first && !allRuns) continue;
		replay.take(bytes, `${file}, line ${number}`);
		taken++;
	}
	if (!replay.begun) throw new UserError(`${file} holds no start of a run.`);
	replay.close();
	return taken;
}

/** Records lines as they come. A training that started this process is told when the run has begun, or why it has not. */
async function follow(replay: Replay, records: RunRecords): Promise<void> {
	// The end of the lines ends it: signals to the training's process group are the training's.
	for (const signal of ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"] as const) process.on(signal, () => {});
	const answer = (refusal: string | null) => process.send?.({ refusal } satisfies TrackerAnswer);
	let number = 0;
	for await (const line of console) {
		const before = replay.begun;
		try {
			replay.take(Buffer.from(line), `Line ${++number}`);
		} catch (error) {
			if (process.send === undefined || before || !(error instanceof UserError)) throw error;
			answer(error.message);
			process.exit(exitCodes.failure);
		}
		if (replay.begun && !before) answer(null);
	}
	replay.close();
	const gaps = records.gaps();
	for (const sentence of gaps) warn(sentence);
	process.exit(gaps.length === 0 ? 0 : exitCodes.failure);
}
