/** The command that imports the data at a path. */
import { detect } from "./detect.ts";

/** `mimo data import …`, in backquotes; null for data that cannot be imported. */
export function importLine(path: string): string | null {
	if (detect(path) === null) return null;
	return `\`mimo data import ${quoted(path)} --output ${quoted(outputName(path))}\``;
}

/** Name of the output, beside the path: "data/a.csv" → "data/a-set". */
function outputName(path: string): string {
	return `${path.replace(/\/+$/, "").replace(/\.[A-Za-z0-9]+$/, "")}-set`;
}

function quoted(path: string): string {
	return /^[\w./:@%+=,-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}
