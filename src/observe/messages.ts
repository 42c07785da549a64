/**
 * Prints messages outside a run's log: with colours and marks on a terminal, as plain sentences elsewhere, so that the output in a
 * scheduler's file or a pipe stays plain. Notes go to standard output, warnings and errors to standard error. URLs are shown
 * without their secrets.
 */
import { type ConsolaInstance, type ConsolaReporter, createConsola } from "consola";
import { shownAddress } from "../system/addresses.ts";

const everything = 3;

const plain: ConsolaReporter = {
	log: ({ args, level }) => {
		(level < 2 ? process.stderr : process.stdout).write(`${args.join(" ")}\n`);
	},
};

function reporter(stream: NodeJS.WriteStream): ConsolaInstance {
	// The level is explicit because consola's default prints nothing where it detects a test environment.
	return stream.isTTY
		? createConsola({ level: everything })
		: createConsola({ level: everything, throttle: 0, reporters: [plain] });
}

const output = reporter(process.stdout);
const errors = reporter(process.stderr);

/** Prints a note. */
export function note(sentence: string): void {
	output.info(shownAddress(sentence));
}

/** Prints a warning. */
export function warn(sentence: string): void {
	errors.warn(shownAddress(sentence));
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
	errors.error(shownAddress(sentence));
}
