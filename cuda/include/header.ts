/**
 * Reads the headers of this folder, which are the one definition of the ABI: mimo.h includes those of mimo/. They are plain C in
 * a narrow form: enumerations with every value written out, structs of scalars, pointers and arrays of constant length,
 * functions with named arguments, and `#define`s of numbers. Anything else is an error that names the header and the line.
 */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { FieldType } from "../../src/native/structs.ts";

export const headerFolder = import.meta.dir;

export interface HeaderFile {
	/** From the folder of headers, such as "mimo/ops/rope.h". */
	readonly path: string;
	readonly text: string;
}

/** Type of a function's result: a number, or a zero-terminated string. */
export type ReturnType = FieldType | "cstring";

export interface Signature {
	readonly args: readonly FieldType[];
	readonly returns: ReturnType;
}

/** The declarations of a header. */
export interface Header {
	/** Numbers of `#define MIMO_NAME number`, by NAME. */
	readonly constants: Readonly<Record<string, number>>;
	/** Members of every enum by their C names; the enum without its prefix "mimo_". */
	readonly enums: Readonly<Record<string, Readonly<Record<string, number>>>>;
	/** Fields of every struct that does not belong to an operation, by name without "mimo_". */
	readonly structs: Readonly<Record<string, Readonly<Record<string, FieldType>>>>;
	/** Fields of mimo_NAME_args by NAME: operations are the functions that take a stream and such a struct. */
	readonly operations: Readonly<Record<string, Readonly<Record<string, FieldType>>>>;
	/** The other functions, by their C names. */
	readonly functions: Readonly<Record<string, Signature>>;
}

const scalars: Readonly<Record<string, FieldType>> = { int64_t: "i64", int32_t: "i32", float: "f32", double: "f64" };

/** A declaration such as "const float* x" or "char host[64]": its name and type. */
function declaration(path: string, text: string, sizes: Readonly<Record<string, number>>): [string, FieldType] {
	const match = /^(?:const )?(\w+)( ?\*{1,2} ?| )(\w+)(?:\[(\w+)\])?$/.exec(text.trim().replace(/\s+/g, " "));
	const wrong = (why: string) => new Error(`${path}: "${text.trim()}" ${why}.`);
	if (match === null) throw wrong("is not read as a declaration");
	const [, type, stars, name, length] = match;
	if (stars !== " ") {
		if (length !== undefined) throw wrong("is an array of pointers, which the tables cannot say");
		return [name!, "ptr"];
	}
	if (length !== undefined) {
		const elements = sizes[length] ?? Number(length);
		const element = type === "char" ? "char" : type === "int64_t" ? "i64" : null;
		if (element === null || !Number.isInteger(elements)) throw wrong("is not an array of known length and type");
		return [name!, [element, elements]];
	}
	const scalar = scalars[type!];
	if (scalar === undefined) throw wrong("has a type without a counterpart in TypeScript");
	return [name!, scalar];
}

/** The headers that mimo.h includes, in its order. */
export function headerFiles(): readonly HeaderFile[] {
	const umbrella = readFileSync(join(headerFolder, "mimo.h"), "utf8");
	const included = [...umbrella.matchAll(/^#include "(mimo\/[\w/]+\.h)"/gm)].map(([, path]) => path!);
	const forgotten = [...new Bun.Glob("mimo/**/*.h").scanSync(headerFolder)].find((path) => !included.includes(path));
	if (forgotten !== undefined) throw new Error(`mimo.h does not include ${forgotten}.`);
	return included.map((path) => ({ path, text: readFileSync(join(headerFolder, path), "utf8") }));
}

function readEnum(path: string, name: string, body: string): Record<string, number> {
	const members = body.split(",").map((member): [string, number] => {
		const match = /^\s*(MIMO_\w+)\s*=\s*(\d+)\s*$/.exec(member);
		if (match === null) throw new Error(`${path}: enum mimo_${name}: "${member.trim()}" has no written value.`);
		return [match[1]!, Number(match[2])];
	});
	return Object.fromEntries(members);
}

/** Reads a header without its comments. */
function readHeader({ path, text: commented }: HeaderFile): Header {
	const text = commented.replace(/\/\*[\s\S]*?\*\//g, " ");
	const defines = [...text.matchAll(/^#define\s+MIMO_(\w+)\s+(\d+)\s*$/gm)];
	const constants = Object.fromEntries(defines.map(([, name, value]) => [name!, Number(value)]));
	const enums = Object.fromEntries(
		[...text.matchAll(/enum\s+mimo_(\w+)\s*\{([^}]*)\}/g)].map(([, name, body]) => [
			name!,
			readEnum(path, name!, body!),
		]),
	);
	const sizes = Object.assign(
		Object.fromEntries(Object.entries(constants).map(([name, value]) => [`MIMO_${name}`, value])),
		...Object.values(enums),
	) as Record<string, number>;
	const structs: Record<string, Record<string, FieldType>> = {};
	for (const [, name, body, alias] of text.matchAll(/typedef\s+struct\s+mimo_(\w+)\s*\{([^}]*)\}\s*mimo_(\w+);/g)) {
		if (name !== alias) throw new Error(`${path}: struct mimo_${name} is called mimo_${alias}.`);
		const fields = body!.split(";").filter((field) => field.trim() !== "");
		structs[name!] = Object.fromEntries(fields.map((field) => declaration(path, field, sizes)));
	}
	const operations: Record<string, Record<string, FieldType>> = {};
	const functions: Record<string, Signature> = {};
	for (const [, returns, name, list] of text.matchAll(/MIMO_API\s+([\w\s*]+?)\s*\bmimo_(\w+)\s*\(([^)]*)\)\s*;/g)) {
		const args = list!.trim() === "void" ? [] : list!.split(",");
		const own = structs[`${name}_args`];
		if (own !== undefined) {
			const wanted = [`mimo_stream* stream`, `const mimo_${name}_args* args`];
			if (returns !== "int32_t" || args.map((arg) => arg.trim().replace(/\s+/g, " ")).join() !== wanted.join()) {
				throw new Error(`${path}: the operation mimo_${name} does not take (${wanted.join(", ")}).`);
			}
			operations[name!] = own;
			delete structs[`${name}_args`];
			continue;
		}
		functions[`mimo_${name}`] = {
			args: args.map((argument) => declaration(path, argument, sizes)[1]),
			returns: /^const char\s*\*$/.test(returns!) ? "cstring" : declaration(path, `${returns} result`, sizes)[1],
		};
	}
	const orphan = Object.keys(structs).find((name) => name.endsWith("_args"));
	if (orphan !== undefined) throw new Error(`${path}: struct mimo_${orphan} belongs to no operation.`);
	return { constants, enums, structs, operations, functions };
}

/**
 * Reads the ABI: what every header declares, by its path. A header is read alone: its arrays have lengths that it defines.
 * Throws an Error that quotes a declaration it cannot parse.
 */
export function readHeaders(files = headerFiles()): ReadonlyMap<string, Header> {
	return new Map(files.map((file) => [file.path, readHeader(file)]));
}

/** The declarations of all headers together. */
export function wholeAbi(headers = readHeaders()): Header {
	const all = [...headers.values()];
	const merged = <Part extends keyof Header>(part: Part) =>
		Object.assign({}, ...all.map((header) => header[part])) as Header[Part];
	return {
		constants: merged("constants"),
		enums: merged("enums"),
		structs: merged("structs"),
		operations: merged("operations"),
		functions: merged("functions"),
	};
}
