/** The PATH argument of the `mimo data` commands, and how a remote one is read. */

export const pathArgument = {
	type: "positional",
	required: true,
	description: "Prepared folder, JSONL file or metadataset.",
	valueHint: "PATH",
} as const;

/** A flag of `mimo train` that commands without its configuration take too. */
export const redirectsFlag = "data-private-redirects";

/** PATH without trailing slashes. */
export function datasetPath(given: string): string {
	return given.replace(/(?<=.)\/+$/, "");
}
