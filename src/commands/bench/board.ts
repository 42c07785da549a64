/** The board of records, a Markdown file: a row is added to the table below its heading. */
import { existsSync, writeFileSync } from "node:fs";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";
import { fileError } from "../../system/system-errors.ts";

const heading = "## Steps by `mimo bench`";
const titles = [
	"date",
	"commit",
	"hardware",
	"model",
	"median (least) ms",
	"rate a GPU",
	"loss",
	"what changed",
] as const;

/** Bytes of the largest board that is read. */
const largest = 2 ** 24;

/** Cells of a row by title. */
export type Row = Readonly<Record<(typeof titles)[number], string>>;

/** Adds a row; a file that is absent is made. */
export function addRow(path: string, row: Row): void {
	const before = existsSync(path) ? readWholeText(path, largest) : `# Records\n\n${emptyTable()}`;
	const at = before.indexOf(heading);
	if (at < 0) throw new UserError(`${path} has no heading "${heading}", below which rows are written.`);
	const lines = before.slice(at).split("\n");
	const first = lines.findIndex((line) => line.startsWith("|"));
	if (first < 0) throw new UserError(`${path} has no table below "${heading}".`);
	let end = first;
	while (lines[end]?.startsWith("|")) end++;
	lines.splice(end, 0, line(titles.map((title) => row[title].replaceAll("|", "\\|"))));
	try {
		writeFileSync(path, before.slice(0, at) + lines.join("\n"));
	} catch (error) {
		throw fileError("write", path, error);
	}
}

function emptyTable(): string {
	return [heading, "", line(titles), line(titles.map(() => "---")), ""].join("\n");
}

const line = (cells: readonly string[]) => `| ${cells.join(" | ")} |`;
