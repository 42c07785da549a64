/** JSON files of reference folders. Errors name the file and the field. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { UserError } from "../system/errors.ts";
import { indexLimits, readJsonText } from "../system/json.ts";

/** Reads a file and checks it. */
export function readReferenceJson<Schema extends v.GenericSchema>(schema: Schema, path: string): v.InferOutput<Schema> {
	const result = v.safeParse(schema, readJson(path));
	if (result.success) return result.output;
	const issue = result.issues[0];
	throw new UserError(`${path}: ${v.getDotPath(issue) ?? "the file"}: ${issue.message}.`);
}

/** Whether config.json of the folder is there and has all these keys. */
export function configurationHas(folder: string, ...keys: readonly string[]): boolean {
	const path = join(folder, "config.json");
	if (!existsSync(path)) return false;
	const config = readJson(path);
	return typeof config === "object" && config !== null && keys.every((key) => key in config);
}

function readJson(path: string): unknown {
	if (!existsSync(path)) throw new UserError(`${path} is missing.`);
	const text = readJsonText(path, indexLimits);
	try {
		return JSON.parse(text);
	} catch (error) {
		throw new UserError(`${path} is not JSON: ${(error as Error).message}.`);
	}
}

/** Exactly these keys, or a UserError that names the first that is missing or unknown. */
export function requireKeys(what: string, found: Readonly<Record<string, unknown>>, wanted: readonly string[]): void {
	const missing = wanted.find((name) => !(name in found));
	if (missing !== undefined) throw new UserError(`${what} has no ${missing}.`);
	const known = new Set(wanted);
	const unknown = Object.keys(found).find((name) => !known.has(name));
	if (unknown !== undefined) throw new UserError(`${what} has ${unknown}, which the model does not have.`);
}
