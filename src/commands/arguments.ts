/** Reads the values of flags that a command declares to citty; null where a flag is not given. */
import { type DtypeTag, isDtypeTag, isFloatDtype } from "../checkpoint/index.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";

export type Arguments = { readonly [name: string]: unknown; readonly _: readonly string[] };

/** The error about a flag's value; `allowed` ends the sentence. */
export function flagError(name: string, value: string, allowed: string): UserError {
	return new UserError(`--${name} is ${JSON.stringify(value)}; allowed is ${allowed}.`, exitCodes.usage);
}

export function text(given: Arguments, name: string): string | null {
	const value = given[name];
	return typeof value === "string" && value !== "" ? value : null;
}

/** Items between commas; empty where the flag is not given. */
export function list(given: Arguments, name: string): string[] {
	return (text(given, name) ?? "").split(",").filter((item) => item !== "");
}

export function whole(given: Arguments, name: string): number | null {
	const value = text(given, name);
	if (value === null) return null;
	if (!/^[0-9]{1,12}$/.test(value)) throw flagError(name, value, "an integer from 0");
	return Number(value);
}

export function choice<const Name extends string>(
	given: Arguments,
	name: string,
	allowed: readonly Name[],
): Name | null {
	const value = text(given, name);
	if (value === null) return null;
	const found = allowed.find((candidate) => candidate === value);
	if (!found) throw flagError(name, value, allowed.join(", "));
	return found;
}

/** Bytes of --max-shard-size: "500MB", "5GB", or a number of bytes. */
export function bytesOf(size: string): number {
	const match = /^([0-9]{1,12})\s*(B|kB|KB|MB|GB|TB)?$/.exec(size);
	if (!match) throw flagError("max-shard-size", size, "a size such as 500MB or 5GB");
	const factor = { B: 1, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[match[2] ?? "B"]!;
	return Number(match[1]) * factor;
}

/** The float type of --dtype. */
export function dtypeOf(given: Arguments): DtypeTag | null {
	const value = text(given, "dtype");
	if (value === null) return null;
	const name = value.toUpperCase();
	if (isDtypeTag(name) && isFloatDtype(name)) return name;
	throw flagError("dtype", value, "F32, BF16, F16, F64");
}
