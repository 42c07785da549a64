/** Megatron's timers: each rank measures its own; the reporting rank collects them for each log line. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { Observer } from "../../observe/step-report.ts";
import { Timers, timerNames } from "../../observe/timers.ts";
import type { World } from "../../parallel/index.ts";
import { isReportingRank, type Run } from "../assemble.ts";
import type { Listener } from "../listeners.ts";
import { settleOf } from "./step-metrics.ts";

/** Seconds of one exchanged integer: the last digit that is shown. */
const unit = 1e-5;

/** Opens the timers; null: --timing-log-level is 0. */
export function openTiming(
	c: TrainingConfiguration,
	run: Run,
	world: World,
	observer: Observer,
): { readonly timers: Timers; readonly listener: Listener } | null {
	if (c.timingLogLevel === 0) return null;
	const timers = new Timers(c.timingLogLevel, settleOf(world.device));
	let steps = 0;
	let first = true;
	const listener: Listener = {
		afterStep: ({ progress: { iteration } }) => {
			steps++;
			if (!first && iteration % c.logInterval !== 0) return;
			const own = timerNames.map((name) => {
				const seconds = timers.seconds(name) / steps;
				return seconds > 0 ? Math.max(1, Math.round(seconds / unit)) : 0;
			});
			if (!isReportingRank(run)) run.state.world.contribute(Int32Array.from(own));
			else {
				const everyone = run.state.world.exchange(Int32Array.from(own));
				const seconds = new Map(timerNames.map((name, i) => [name, everyone.map((values) => values[i]! * unit)]));
				observer.timers?.({ iteration, option: c.timingLogOption, seconds });
			}
			// The first step is averaged into the second line, as in the log line that this one follows.
			if (!first) {
				timers.reset();
				steps = 0;
			}
			first = false;
		},
	};
	return { timers, listener };
}
