/**
 * The secret of a run: text that its ranks alone know. They get it from the environment of the job, or from a file
 * that its owner alone can read. Without one ranks meet on this host's loopback interface alone, and the kernel says whether
 * the process on the other side belongs to the same user.
 */
import { createHmac } from "node:crypto";
import { closeSync, constants, fstatSync, openSync, readFileSync } from "node:fs";
import { UserError } from "../native/errors.ts";

type Environment = Readonly<Record<string, string | undefined>>;

export const secretVariable = "MIMO_SECRET";
export const secretFileVariable = "MIMO_SECRET_FILE";

/** Characters. */
const fileLength = { least: 16, most: 4096 };

/**
 * The secret that the environment gives this process, or null. That of a file is made one of `run`, a name that may be known:
 * a file serves many runs, whose ranks do not let each other in. Throws a UserError about a file that others could read.
 */
export function secretFromEnvironment(environment: Environment, run: string): string | null {
	const given = environment[secretVariable]?.trim();
	if (given) return given;
	const path = environment[secretFileVariable];
	if (!path) return null;
	return createHmac("sha256", readSecretFile(path)).update(`secret of ${run}`).digest("hex");
}

/** The text of a file, which must be this user's and closed to everybody else. Throws a UserError. */
export function readSecretFile(path: string): string {
	const refuse = (why: string): never => {
		throw new UserError(
			`${secretFileVariable} ${path} ${why}; make it by: (umask 077; head -c 32 /dev/urandom | base64 > ${path})`,
		);
	};
	let file: number;
	try {
		// Not waiting for the writer of a pipe.
		file = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
	} catch (error) {
		return refuse(`cannot be opened (${(error as NodeJS.ErrnoException).code})`);
	}
	try {
		const about = fstatSync(file);
		if (!about.isFile()) refuse("is no regular file");
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
