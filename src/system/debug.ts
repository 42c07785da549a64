/**
 * MIMO_DEBUG levels: 1 commands and the phases of a start, 2 steps, 3 operations, 4 calls of the native library. Lines go to
 * standard error with the seconds since the process started.
 */
import { UserError } from "./errors.ts";
import { exitCodes } from "./exit-codes.ts";

export type DebugLevel = 1 | 2 | 3 | 4;

const text = process.env.MIMO_DEBUG ?? "";
const known = /^[0-4]?$/.test(text);
const level = known ? Number(text) : 0;

/** Throws a UserError if MIMO_DEBUG is not a level. */
export function requireDebugLevel(): void {
	if (known) return;
	throw new UserError(`MIMO_DEBUG is ${JSON.stringify(text)}; allowed is a level from 0 to 4.`, exitCodes.usage);
}

/** Whether lines of this level are printed; for callers whose line is expensive to build. */
export function debugging(of: DebugLevel): boolean {
	return level >= of;
}

/** Prints a line when MIMO_DEBUG is at least `of`. */
export function debug(of: DebugLevel, line: string): void {
	if (level >= of) process.stderr.write(`mimo[${of}] ${(performance.now() / 1000).toFixed(3)} s ${line}\n`);
}
