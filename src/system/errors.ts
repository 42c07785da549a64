import { shownAddress } from "./addresses.ts";
import { exitCodes } from "./exit-codes.ts";

/**
 * A mistake of the user or of their input: one sentence that names the file, key, line, rank or sample. Commands print
 * it without a stack trace and exit with `exitCode`.
 */
export class UserError extends Error {
	override readonly name = "UserError";
	constructor(
		sentence: string,
		readonly exitCode: number = exitCodes.failure,
	) {
		super(printable(sentence));
	}
}

/** Results of ranks contradict each other. `rank`: whose are wrong; null: that cannot be told. Every rank may say it of another. */
export class WrongResult extends UserError {
	constructor(
		readonly rank: number | null,
		sentence: string,
	) {
		super(sentence, exitCodes.wrongResult);
	}
}

/** Characters of the longest sentence; a hostile name may have millions. */
const LONGEST_SENTENCE = 8192;

/**
 * Names come from files: characters that a terminal would take as a command are escaped, and long names are cut in the
 * middle. URLs are shown without their secrets.
 */
export function printable(sentence: string): string {
	const hexadecimal = (character: string) => `\\x${character.charCodeAt(0).toString(16).padStart(2, "0")}`;
	// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are escaped here
	return cut(cut(shownAddress(sentence)).replace(/[\0-\x08\x0b-\x1f\x7f-\x9f]/g, hexadecimal));
}

function cut(text: string): string {
	const half = LONGEST_SENTENCE / 2;
	return text.length > LONGEST_SENTENCE ? `${text.slice(0, half)} … ${text.slice(-half)}` : text;
}

/**
 * The errors that an error stands for, the earliest first. A `using` that fails to release its resource while another error
 * is thrown makes a SuppressedError, which has no message of its own; equal messages of a chain are listed once.
 */
export function errorsOf(error: unknown): readonly [unknown, ...unknown[]] {
	if (!(error instanceof SuppressedError)) return [error];
	const [first, ...before] = errorsOf(error.suppressed);
	const known = new Set([first, ...before].map(ownMessage));
	return [first, ...before, ...errorsOf(error.error).filter((one) => !known.has(ownMessage(one)))];
}

/** The message of an error, with those of all errors that it stands for; URLs are shown without their secrets. */
export function messageOf(error: unknown): string {
	return shownAddress(errorsOf(error).map(ownMessage).join(" Then: "));
}

function ownMessage(error: unknown): string {
	return error instanceof Error ? error.message || error.name : String(error);
}

/** A native call failed. `status` is one of abi.ts's Status; the message is the library's own sentence. */
export class NativeError extends Error {
	override readonly name = "NativeError";
	constructor(
		readonly call: string,
		readonly status: number,
		sentence: string,
	) {
		super(sentence);
	}
}
