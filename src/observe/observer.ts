/** The observer of a training run: log lines, a progress line, a JSON log, TensorBoard, MLflow, Weights & Biases. */

import { LogLine, type LogLineOptions } from "./log-line.ts";
import { type MlflowOptions, MlflowRun } from "./mlflow.ts";
import { ProgressLine, Terminal, type TerminalStream } from "./progress.ts";
import { JsonLog } from "./run-log/writer.ts";
import type { ScalarOptions } from "./scalars.ts";
import { type Observer, together } from "./step-report.ts";
import { TensorBoard } from "./tensorboard/writer.ts";
import { type WandbOptions, WandbRun } from "./wandb/run.ts";

export interface ObserverOptions
	extends Pick<LogLineOptions, "logInterval" | "trainIterations" | "flopsPerStep" | "worldSize" | "caution">,
		ScalarOptions {
	/** File of the JSON log, or null. */
	readonly logJson: string | null;
	/** Folder of TensorBoard events, or null. */
	readonly tensorBoard: string | null;
	readonly mlflow: Omit<MlflowOptions, keyof ScalarOptions> | null;
	readonly wandb: Omit<WandbOptions, keyof ScalarOptions> | null;
	readonly output?: TerminalStream;
}

/** Opens everything that shows or stores a run. Throws a UserError when a file of it cannot be written. */
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
						options.caution === null ? {} : { caution: options.caution },
					),
				]),
		...(options.tensorBoard === null ? [] : [new TensorBoard({ ...options, folder: options.tensorBoard })]),
		...(options.mlflow === null ? [] : [new MlflowRun({ ...options, ...options.mlflow })]),
		...(options.wandb === null ? [] : [new WandbRun({ ...options, ...options.wandb })]),
		line,
		...(terminal.interactive ? [new ProgressLine(terminal, options.trainIterations)] : []),
	]);
}
