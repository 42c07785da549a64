/** Sentences for errors of the operating system. */
import { UserError } from "./errors.ts";

const reasons: Readonly<Record<string, string>> = {
	ENOENT: "it does not exist",
	EEXIST: "a file of that name is in the way",
	EACCES: "permission denied",
	EPERM: "permission denied",
	EISDIR: "it is a folder",
	ENOTDIR: "a part of its path is not a folder",
	ENOSPC: "no space left on the device",
	EDQUOT: "the disk quota is exceeded",
	EROFS: "the file system is read-only",
	EIO: "the device reported an input/output error",
	EFBIG: "the file would be larger than the file system or ulimit -f allows",
	EMFILE: "too many open files (ulimit -n)",
	ENFILE: "the system has too many open files",
	ELOOP: "it is a symbolic link, or links lead in a circle",
	ENXIO: "it is not a regular file",
	ENAMETOOLONG: "its name is too long",
};

/** Why the system refused something, as the end of a sentence. */
export function systemReason(error: unknown): string {
	const { code, message } = error as NodeJS.ErrnoException;
	return reasons[code ?? ""] ?? message;
}

/** Whether a failure, or a UserError about one, is that there is no such file. */
export function isMissing(error: unknown): boolean {
	const { code, cause } = error as NodeJS.ErrnoException;
	return (code ?? (cause as NodeJS.ErrnoException | undefined)?.code) === "ENOENT";
}

/** `Cannot <action> <path>: <reason>.` as a UserError that keeps the system's error as its cause. */
export function fileError(action: string, path: string, error: unknown): UserError {
	const failure = new UserError(`Cannot ${action} ${path}: ${systemReason(error)}.`);
	failure.cause = error;
	return failure;
}
