/** The data set that a `mimo data` command looks at. */

/** The positional argument, for citty. */
export const pathArgument = {
	type: "positional",
	required: true,
	description: "Prepared folder, JSONL file or metadataset.",
	valueHint: "PATH",
} as const;

/** The positional argument without trailing slashes. */
export function datasetPath(given: string): string {
	return given.replace(/(?<=.)\/+$/, "");
}
