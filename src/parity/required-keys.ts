/** Checks that a record of a reference has exactly the entries of the model. */
import { UserError } from "../system/errors.ts";

/** Exactly these keys, or a UserError that names the first that is missing or unknown. */
export function requireKeys(what: string, found: Readonly<Record<string, unknown>>, wanted: readonly string[]): void {
	const missing = wanted.find((name) => !(name in found));
	if (missing !== undefined) throw new UserError(`${what} has no ${missing}.`);
	const known = new Set(wanted);
	const unknown = Object.keys(found).find((name) => !known.has(name));
	if (unknown !== undefined) throw new UserError(`${what} has ${unknown}, which the model does not have.`);
}
