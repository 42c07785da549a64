/**
 * MIMO_DEBUG levels: 1 commands and the phases of a start, 2 steps, 3 operations, 4 calls of the native library. Lines go to
 * standard error with the seconds since the process started.
 */
export type DebugLevel = 1 | 2 | 3 | 4;

const level = Number(process.env.MIMO_DEBUG ?? 0);

/** Whether lines of this level are printed; to be checked before building an expensive line. */
export function debugging(of: DebugLevel): boolean {
	return level >= of;
}

/** Prints a line when MIMO_DEBUG is at least `of`. */
export function debug(of: DebugLevel, line: string): void {
	if (level >= of) process.stderr.write(`mimo[${of}] ${(performance.now() / 1000).toFixed(3)} s ${line}\n`);
}
