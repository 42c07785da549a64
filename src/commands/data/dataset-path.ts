/** The data set that a `mimo data` command looks at. */

/** The positional argument, for citty. */
export const pathArgument = {
	type: "positional",
	required: true,
	description: "Prepared folder, JSONL file or metadataset.",
	valueHint: "PATH",
} as const;

/** Its value as data sets are named: without slashes at the end. */
export function datasetPath(given: string): string {
	return given.replace(/(?<=.)\/+$/, "");
}
