/** YAML and JSON files that a command is given. */
import { readFileSync } from "node:fs";
import { parse } from "yaml";
import { UserError } from "../system/errors.ts";
import { systemReason } from "../system/system-errors.ts";

/** The file's content. `called`: the file in a sentence about it. Throws a UserError that names it. */
export function readYaml(path: string, called: string): unknown {
	let text: string;
	try {
		text = readFileSync(path, "utf8");
	} catch (error) {
		throw new UserError(`${called} cannot be read: ${systemReason(error)}.`);
	}
	try {
		return parse(text);
	} catch (error) {
		const reason = (error as Error).message.split("\n")[0]!.replace(/:$/, "");
		throw new UserError(`${path} is neither YAML nor JSON: ${reason}.`);
	}
}
