/**
 * Sentences for people, outside a run's log: coloured and marked on a terminal, the bare sentence everywhere else, so
 * that output collected by a scheduler or a pipe stays plain. Notes go to standard output, warnings and errors to
 * standard error.
 */
import { type ConsolaInstance, type ConsolaReporter, createConsola } from "consola";

const everything = 3;

const plain: ConsolaReporter = {
	log: ({ args, level }) => {
		(level < 2 ? process.stderr : process.stdout).write(`${args.join(" ")}\n`);
	},
};

function reporter(stream: NodeJS.WriteStream): ConsolaInstance {
	// A level of our own: consola's default falls silent where it takes the environment for a test's.
	return stream.isTTY
		? createConsola({ level: everything })
		: createConsola({ level: everything, throttle: 0, reporters: [plain] });
}

const output = reporter(process.stdout);
const errors = reporter(process.stderr);

/** Something worth knowing. */
export function note(sentence: string): void {
	output.info(sentence);
}

/** Prints a warning. */
export function warn(sentence: string): void {
	errors.warn(sentence);
}

/** Why the program ends. */
export function complain(sentence: string): void {
	errors.error(sentence);
}
