/**
 * A mistake of the user or of their input: one sentence that names the file, key, line, rank or sample. Commands print
 * it without a stack trace and exit with `exitCode`.
 */
export class UserError extends Error {
	override readonly name = "UserError";
	constructor(
		sentence: string,
		readonly exitCode = 1,
	) {
		super(sentence);
	}
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
