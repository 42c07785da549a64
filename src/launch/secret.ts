/**
 * The secret of a run, known to its ranks alone: from the job's environment, or from a file that only its owner can read. Without
 * a secret ranks join on this host's loopback interface only, and the kernel tells whether the other process belongs to the same
 * user.
 */
import { createHmac } from "node:crypto";
import { closeSync, constants, fstatSync, openSync, readFileSync } from "node:fs";
import { UserError } from "../system/errors.ts";

type Environment = Readonly<Record<string, string | undefined>>;

export const secretVariable = "MIMO_SECRET";
export const secretFileVariable = "MIMO_SECRET_FILE";

/** Limits of the secret's length in characters. */
const fileLength = { least: 16, most: 4096 };

/**
 * The secret from the environment, or null. A file's secret is combined with `run`, a name that may be public: one file serves
 * many runs, whose ranks must not join each other. Throws a UserError for a file that others could read.
 */
export function secretFromEnvironment(environment: Environment, run: string): string | null {
	const given = environment[secretVariable]?.trim();
	if (given) return given;
	const path = environment[secretFileVariable];
	if (!path) return null;
	return createHmac("sha256", readSecretFile(path)).update(`secret of ${run}`).digest("hex");
}

/** The text of a file that must belong to this user and be inaccessible to all others. Throws a UserError otherwise. */
export function readSecretFile(path: string): string {
	const refuse = (why: string): never => {
		throw new UserError(
			`${secretFileVariable} ${path} ${why}; make it by: (umask 077; head -c 32 /dev/urandom | base64 > ${path})`,
		);
	};
	let file: number;
	try {
		// O_NONBLOCK: opening a pipe must not wait for its writer.
		file = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
	} catch (error) {
		return refuse(`cannot be opened (${(error as NodeJS.ErrnoException).code})`);
	}
	try {
		const about = fstatSync(file);
		if (!about.isFile()) refuse("is not a regular file");
		if (about.uid !== process.geteuid!()) refuse("belongs to another user");
		if ((about.mode & 0o077) !== 0) refuse("can be read or written by others (allowed is mode 600)");
		if (about.size > fileLength.most) refuse(`is longer than ${fileLength.most} bytes`);
		const text = readFileSync(file, "utf8").trim();
		if (text.length < fileLength.least) refuse(`holds fewer than ${fileLength.least} characters`);
		return text;
	} finally {
		closeSync(file);
	}
}
