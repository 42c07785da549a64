/** The observer of a training run: log lines, a progress line on a terminal, a JSON log, TensorBoard events. */
import { JsonLog } from "./json-log.ts";
import { LogLine, type LogLineOptions } from "./log-line.ts";
import { ProgressLine, Terminal, type TerminalStream } from "./progress.ts";
import { type Observer, together } from "./report.ts";
import { TensorBoard, type TensorBoardOptions } from "./tensorboard.ts";

export interface ObserverOptions
	extends Pick<LogLineOptions, "logInterval" | "trainIterations" | "flopsPerStep" | "worldSize"> {
	/** File of the JSON log, or null. */
	readonly logJson: string | null;
	/** null: no TensorBoard events. */
	readonly tensorBoard: Pick<TensorBoardOptions, "folder" | "interval" | "timers"> | null;
	readonly output?: TerminalStream;
}

/** Opens everything that shows or stores a run. Throws a UserError when the JSON log cannot be written. */
export function openObserver(options: ObserverOptions): Observer {
	const terminal = new Terminal(options.output ?? process.stdout);
	const line = new LogLine({ ...options, write: (text) => terminal.line(text), now: () => new Date() });
	return together([
		...(options.logJson === null
			? []
			: [
					new JsonLog(
						options.logJson,
						() => new Date(),
						(text) => terminal.line(text),
					),
				]),
		...(options.tensorBoard === null ? [] : [new TensorBoard({ ...options, ...options.tensorBoard })]),
		line,
		...(terminal.interactive ? [new ProgressLine(terminal, options.trainIterations)] : []),
	]);
}
