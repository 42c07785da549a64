/**
 * The interface of a fuzzed parser. A file in tests/fuzz/parsers/ registers one: its name is the parser's, its default
 * export a FuzzParser.
 */
import { UserError } from "../../src/system/errors.ts";

export interface FuzzTarget extends Partial<Disposable> {
	/** Small valid inputs; each must be accepted unchanged. Mutations begin with these. */
	readonly seeds: readonly Uint8Array[];
	/** Keys, magic numbers, opcodes that are inserted. */
	readonly dictionary?: readonly (string | Uint8Array)[];
	/** The seeds are JSON: values, members and keys are exchanged too. */
	readonly json?: boolean;
	/**
	 * Makes checksums and lengths fit a mutated input again, so that the parser behind them is reached; half of the
	 * cases.
	 */
	readonly repair?: (bytes: Uint8Array) => Uint8Array;
	/** Reads an input from front to back. Returns when it is accepted, throws when it is refused. */
	readonly parse: (bytes: Uint8Array) => unknown;
	/** Whether an error refuses the input; default: a UserError that names `inputName`. */
	readonly refuses?: (error: unknown) => boolean;
	/** Milliseconds that one input may take; default 1000. */
	readonly milliseconds?: number;
	/** Bytes by which one input may let the process grow; default 256 MiB. */
	readonly bytes?: number;
}

export interface FuzzParser {
	/** The kind of input, in a few words. */
	readonly about: string;
	readonly open: () => FuzzTarget | Promise<FuzzTarget>;
}

/** Path that parsers are given for an input in memory. Every refusal must name it. */
export const inputName = "fuzzed-input";

/** More than any sentence needs: a refusal must not repeat its input. */
const longestRefusal = 10_000;
// biome-ignore lint/suspicious/noControlCharactersInRegex: a hostile name must not reach a terminal as it is
const controls = /[\0-\x08\x0b-\x1f\x7f-\x9f]/;

/** The default of FuzzTarget.refuses. */
export function isNamedRefusal(error: unknown): boolean {
	if (!(error instanceof UserError)) return false;
	const { message } = error;
	return message.includes(inputName) && message.length <= longestRefusal && !controls.test(message);
}
