/**
 * Every exit code of the program. It stands here alone: the native library, whose threads may have to end a process, is told.
 */
import { constants } from "node:os";

/** Above it codes tell of signals. */
export const signalled = 128;

export const exitCodes = {
	/** A mistake in the input, a machine that refuses something, a result that does not hold. */
	failure: 1,
	/** A command, flag or configuration that was not understood. */
	usage: 2,
	/** A rank ended because another one had failed (BSD's "service unavailable"). */
	endedByAnother: 69,
	/** A bug of this program. */
	unexpected: 70,
	/** The run has stopped early, as asked, and is to be started again (BSD's "temporary failure"). */
	runAgain: 75,
	/** SIGINT stopped the run after a step. */
	interrupted: signalExit("SIGINT"),
	/** The reader of the output is gone; SIGPIPE ends other programs so, without a word. */
	unread: signalExit("SIGPIPE"),
} as const;

/** Exit code of a process that a signal ended, as shells have it: this number plus the signal's. */
export function signalExit(signal: NodeJS.Signals): number {
	return signalled + constants.signals[signal];
}
