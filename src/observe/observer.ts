/** The observer of a training run: log lines, a view on a terminal, a JSON log, TensorBoard, the process of trackers. */

import { LogLine, type LogLineOptions } from "./log-line.ts";
import type { MetricsServer } from "./metrics/server.ts";
import { Terminal, type TerminalStream } from "./progress.ts";
import { JsonLog } from "./run-log/writer.ts";
import type { RunRecords } from "./run-records.ts";
import { RunView } from "./run-view.ts";
import type { ScalarOptions } from "./scalars.ts";
import { type Observer, together } from "./step-report.ts";
import { TensorBoard } from "./tensorboard.ts";
import type { TrackerProcess } from "./tracker-process.ts";

export interface ObserverOptions
	extends Pick<LogLineOptions, "logInterval" | "trainIterations" | "flopsPerStep" | "worldSize" | "caution">,
		ScalarOptions {
	/** File of the JSON log; null: no log. */
	readonly logJson: string | null;
	/** Folder of TensorBoard events; null: no events. */
	readonly tensorBoard: string | null;
	/** The process that records the run for trackers, and how messages name its records; null: no tracker is configured. */
	readonly trackers: { readonly record: TrackerProcess; readonly name: string } | null;
	/** The server of metrics; null: none is configured. */
	readonly metrics: MetricsServer | null;
	/** Handles records that cannot be written. */
	readonly records: RunRecords;
	/** Whether a terminal shows the run in a block with short lines above it. */
	readonly view: boolean;
	readonly output?: TerminalStream;
}

/** Opens all outputs of a run. Throws a UserError if a file cannot be written. */
export function openObserver(options: ObserverOptions): Observer {
	const terminal = new Terminal(options.output ?? process.stdout);
	const hasView = options.view && terminal.interactive && process.env.TERM !== "dumb";
	const line = new LogLine({
		...options,
		width: hasView ? () => terminal.width : null,
		write: (text) => terminal.line(text),
		now: () => new Date(),
	});
	const { logJson, tensorBoard, trackers, caution, records, metrics } = options;
	const opened = [
		logJson === null ? null : { name: `log ${logJson}`, record: openLog(logJson, caution, terminal) },
		tensorBoard === null
			? null
			: { name: `TensorBoard record in ${tensorBoard}`, record: new TensorBoard({ ...options, folder: tensorBoard }) },
		trackers,
	].filter((one) => one !== null);
	return together([
		...opened.map(({ name, record }) => records.keep(name, record)),
		line,
		...(metrics === null ? [] : [metrics]),
		...(hasView ? [viewOf(terminal, options)] : []),
	]);
}

function viewOf(terminal: Terminal, { trainIterations }: ObserverOptions): RunView {
	return new RunView(terminal, { trainIterations, colours: !process.env.NO_COLOR, now: () => performance.now() });
}

function openLog(file: string, caution: string | null, terminal: Terminal): JsonLog {
	const always = caution === null ? {} : { caution };
	return new JsonLog(
		file,
		() => new Date(),
		(text) => terminal.line(text),
		always,
	);
}
