/** All exit codes of the program. The native library, whose threads may end a process, receives them from here. */
import { constants } from "node:os";

/** Exit codes above this number stand for signals: 128 + the signal's number. */
export const signalled = 128;

export const exitCodes = {
	/** A mistake in the input, a refusal by the machine, or a negative result. */
	failure: 1,
	/** An unknown or wrong command, flag or configuration. */
	usage: 2,
	/** A result of this rank must be wrong (Megatron's EXIT_CODE_FAILED_ON_RESULT_VALIDATION). */
	wrongResult: 17,
	/** A rank ended because another rank failed (BSD's EX_UNAVAILABLE). */
	endedByAnother: 69,
	/** A bug of this program (BSD's EX_SOFTWARE). */
	unexpected: 70,
	/** The run has stopped early on request and is to be started again (BSD's EX_TEMPFAIL). */
	runAgain: 75,
	/** SIGINT stopped the run after a step. */
	interrupted: signalExit("SIGINT"),
	/** The reader of the output has exited; the program ends silently, as SIGPIPE would end it. */
	unread: signalExit("SIGPIPE"),
} as const;

/** Exit code of a process that a signal ended, as shells report it: 128 + the signal's number. */
export function signalExit(signal: NodeJS.Signals): number {
	return signalled + constants.signals[signal];
}
