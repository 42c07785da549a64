/** Reads the headers of cuda/include: their enumerations, structs and functions in the terms of src/native/abi.ts. */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { FieldType } from "../../src/native/abi.ts";

export const headerFolder = join(import.meta.dir, "../../cuda/include");

export interface Header {
	readonly version: number;
	/** Members of every enum by their C names. */
	readonly enums: Readonly<Record<string, Readonly<Record<string, number>>>>;
	/** Fields of every struct, in order. */
	readonly structs: Readonly<Record<string, readonly (readonly [string, FieldType])[]>>;
	/** C types of every function. */
	readonly functions: Readonly<Record<string, { readonly args: readonly string[]; readonly returns: string }>>;
}

const scalars: Readonly<Record<string, FieldType>> = {
	int64_t: "i64",
	int32_t: "i32",
	float: "f32",
	double: "f64",
};

/** "const float* x" → ["x", "const float*"]. */
function declaration(text: string): [string, string] {
	const match = /^(.*[\s*])(\w+)((?:\[\d+\])?)$/.exec(text.trim());
	if (!match) throw new Error(`mimo.h: "${text}" is no declaration.`);
	return [match[2]!, `${match[1]!.replace(/\s+/g, " ").trim()}${match[3]}`];
}

/** The type of a field or argument as abi.ts spells it. */
export function abiType(type: string): FieldType {
	if (type.endsWith("*")) return "ptr";
	const array = /^(char|int64_t)\[(\d+)\]$/.exec(type);
	if (array) return [array[1] === "char" ? "char" : "i64", Number(array[2])];
	const scalar = scalars[type];
	if (!scalar) throw new Error(`mimo.h: the type "${type}" has no counterpart in abi.ts.`);
	return scalar;
}

/** Headers of the ABI. */
export const headerNames = ["mimo.h", "mimo_backend.h", "mimo_digest.h", "mimo_hosts.h"];

/** All of them, one after the other. */
export function headerText(): string {
	return headerNames.map((name) => readFileSync(join(headerFolder, name), "utf8")).join("\n");
}

export function readHeader(): Header {
	const text = headerText().replace(/\/\*[\s\S]*?\*\//g, " ");
	const enums = Object.fromEntries(
		[...text.matchAll(/enum\s+mimo_(\w+)\s*\{([^}]*)\}/g)].map(([, name, body]) => {
			const members = body!.split(",").map((member) => member.split("=").map((part) => part.trim()));
			return [name!, Object.fromEntries(members.map(([member, value]) => [member!, Number(value)]))];
		}),
	);
	const structs = Object.fromEntries(
		[...text.matchAll(/typedef\s+struct\s+(mimo_\w+)\s*\{([^}]*)\}\s*(\w+);/g)].map(([, name, body, alias]) => {
			if (name !== alias) throw new Error(`mimo.h: struct ${name} is called ${alias}.`);
			const fields = body!.split(";").filter((field) => field.trim() !== "");
			return [name!, fields.map((field) => declaration(field)).map(([f, type]) => [f, abiType(type)] as const)];
		}),
	);
	const functions = Object.fromEntries(
		[...text.matchAll(/MIMO_API\s+([\w\s*]+?)\s*\b(mimo_\w+)\s*\(([^)]*)\)\s*;/g)].map(([, returns, name, list]) => {
			const args = list!.trim() === "void" ? [] : list!.split(",").map((argument) => declaration(argument)[1]);
			return [name!, { args, returns: returns!.trim() }];
		}),
	);
	return { version: Number(/#define MIMO_ABI_VERSION (\d+)/.exec(text)![1]), enums, structs, functions };
}
