/** The PATH argument of the `mimo data` commands. */

export const pathArgument = {
	type: "positional",
	required: true,
	description: "Prepared folder, JSONL file or metadataset.",
	valueHint: "PATH",
} as const;

/** PATH without trailing slashes. */
export function datasetPath(given: string): string {
	return given.replace(/(?<=.)\/+$/, "");
}
