/** YAML and JSON files that a command is given. */
import { parse } from "yaml";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";

const LARGEST_FILE = 2 ** 24;

/** The file's content. `called`: the file in a sentence about it. Throws a UserError that names it. */
export function readYaml(path: string, called: string): unknown {
	const text = readWholeText(path, LARGEST_FILE, { called });
	try {
		return parse(text);
	} catch (error) {
		const reason = (error as Error).message.split("\n")[0]!.replace(/:$/, "");
		throw new UserError(`${path} is neither YAML nor JSON: ${reason}.`);
	}
}
