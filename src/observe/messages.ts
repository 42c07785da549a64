/**
 * Prints messages outside a run's log as plain sentences. Notes go to standard output, remarks, warnings and errors to standard
 * error. On a terminal a warning begins with "Warning:", coloured unless NO_COLOR is set; in a scheduler's file or a pipe a
 * sentence stands alone. URLs are shown without their secrets.
 */
import { shownAddress } from "../system/addresses.ts";
import { beforeLine, type TerminalStream } from "./progress.ts";

/** Codes of the terminal's colours. */
const [red, yellow] = [31, 33];

function printSentence(stream: TerminalStream, sentence: string): void {
	stream.write(`${beforeLine(stream)}${shownAddress(sentence)}\n`);
}

/** A word in a colour where a terminal shows colours. */
const coloured = (word: string, code: number) => (process.env.NO_COLOR ? word : `\u001b[${code}m${word}\u001b[0m`);

/** Prints a note. */
export function note(sentence: string): void {
	printSentence(process.stdout, sentence);
}

/** Prints a fact that nothing is lost by, beside output that a program may read. */
export function remark(sentence: string): void {
	printSentence(process.stderr, sentence);
}

/** Prints a warning: something is lost, or is not as it was asked for. */
export function warn(sentence: string): void {
	const { stderr } = process;
	printSentence(stderr, stderr.isTTY ? `${coloured("Warning:", yellow)} ${sentence}` : sentence);
}

/** A function that prints the first warning that it is given. */
export function firstWarning(): (sentence: string) => void {
	let isPrinted = false;
	return (sentence) => {
		if (!isPrinted) warn(sentence);
		isPrinted = true;
	};
}

/** Prints why the program ends. */
export function complain(sentence: string): void {
	const { stderr } = process;
	printSentence(stderr, `${stderr.isTTY ? coloured("mimo:", red) : "mimo:"} ${sentence}`);
}
