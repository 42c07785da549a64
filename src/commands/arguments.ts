/** Values of flags that a command declares for citty. */
import { type DtypeTag, isDtypeTag, isFloatDtype } from "../checkpoint/dtype.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";

export type Arguments = { readonly [name: string]: unknown; readonly _: readonly string[] };

export function text(given: Arguments, name: string): string | null {
	const value = given[name];
	return typeof value === "string" && value !== "" ? value : null;
}

export function list(given: Arguments, name: string): string[] {
	return (text(given, name) ?? "").split(",").filter((item) => item !== "");
}

export function whole(given: Arguments, name: string): number | null {
	const value = text(given, name);
	if (value === null) return null;
	if (!/^[0-9]{1,12}$/.test(value)) throw new UserError(`--${name} ${value} is not a whole number.`, exitCodes.usage);
	return Number(value);
}

export function choice<const Name extends string>(
	given: Arguments,
	name: string,
	allowed: readonly Name[],
): Name | null {
	const value = text(given, name);
	if (value === null) return null;
	const found = allowed.find((one) => one === value);
	if (!found) throw new UserError(`--${name} ${value} is none of ${allowed.join(", ")}.`, exitCodes.usage);
	return found;
}

/** "500MB", "5GB", or a number of bytes. */
export function bytesOf(size: string): number {
	const match = /^([0-9]{1,12})\s*(B|kB|KB|MB|GB|TB)?$/.exec(size);
	if (!match) throw new UserError(`--max-shard-size ${size} is not a size; write 500MB or 5GB.`, exitCodes.usage);
	const factor = { B: 1, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[match[2] ?? "B"]!;
	return Number(match[1]) * factor;
}

/** --dtype; null: not given. */
export function dtypeOf(given: Arguments): DtypeTag | null {
	const name = text(given, "dtype")?.toUpperCase() ?? null;
	if (name === null) return null;
	if (isDtypeTag(name) && isFloatDtype(name)) return name;
	throw new UserError(`--dtype ${name} is none of F32, BF16, F16 and F64.`, exitCodes.usage);
}
