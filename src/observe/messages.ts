/**
 * Prints messages outside a run's log as plain sentences. Notes go to standard output, remarks, warnings and errors to standard
 * error. On a terminal a warning begins with "Warning:", coloured unless NO_COLOR is set; in a scheduler's file or a pipe a
 * sentence stands alone. URLs are shown without their secrets.
 */
import { type ConsolaReporter, createConsola } from "consola";
import { colors } from "consola/utils";
import { shownAddress } from "../system/addresses.ts";
import { beforeLine } from "./progress.ts";

const { stdout, stderr } = process;

/** consola's own reporters add a clock and badges. */
const sentences: ConsolaReporter = {
	log: ({ args, type }) => {
		const stream = type === "info" ? stdout : stderr;
		const mark = type === "error" ? "mimo: " : type === "warn" && stream.isTTY ? "Warning: " : "";
		const coloured = stream.isTTY ? (type === "error" ? colors.red(mark) : colors.yellow(mark)) : mark;
		stream.write(`${beforeLine(stream)}${coloured}${shownAddress(args.join(" "))}\n`);
	},
};

// The level is explicit because consola's default prints nothing where it detects a test environment.
const messages = createConsola({ level: 3, throttle: 0, reporters: [sentences] });

/** Prints a note. */
export function note(sentence: string): void {
	messages.info(sentence);
}

/** Prints a fact that nothing is lost by, beside output that a program may read. */
export function remark(sentence: string): void {
	messages.log(sentence);
}

/** Prints a warning: something is lost, or is not as it was asked for. */
export function warn(sentence: string): void {
	messages.warn(sentence);
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
	messages.error(sentence);
}
