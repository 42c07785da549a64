/**
 * Generates tables from the headers of this folder: src/native/abi.ts for TypeScript, and the list of operations from which the
 * libraries export their symbols. The files are checked in, so that the program runs from its sources without a build; build.ts
 * writes them before it compiles, `bun build.ts tables` writes them alone, and tests/native/abi.test.ts compares them with the
 * headers.
 */
import { type Header, readHeaders, type Signature, wholeAbi } from "./header.ts";

/** Most columns of a line. As the formatter does, a table's entry takes one line where it fits. */
const width = 120;

function camelCase(name: string): string {
	return name.toLowerCase().replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
}

function pascalCase(name: string): string {
	return camelCase(`_${name}`);
}

/**
 * Names of an enum's members without their common prefix and "ERROR" (MIMO_ERROR_OUT_OF_MEMORY: outOfMemory). A member that
 * counts the others (MIMO_TAG_COUNT) is left out.
 */
function memberNames(members: Readonly<Record<string, number>>): Record<string, number> {
	const words = Object.keys(members).map((name) => name.split("_"));
	let shared = 0;
	while (words.every((w) => w[shared] === words[0]![shared] && shared < w.length - 1)) shared++;
	const named = Object.values(members).map((value, i): [string, number] => {
		const own = words[i]!.slice(shared);
		return [camelCase((own[0] === "ERROR" ? own.slice(1) : own).join("_")), value];
	});
	return Object.fromEntries(named.filter(([name, value], i) => !(name === "count" && value === i)));
}

type Value = string | number | readonly Value[] | { readonly [key: string]: Value };

/** A value as the formatter would write it between `before` and `after`, at a depth of `depth` tabs of two columns. */
function literal(value: Value, before: string, after: string, depth: number): string {
	const tabs = "\t".repeat(depth);
	if (typeof value !== "object") return `${tabs}${before}${JSON.stringify(value)}${after}`;
	const line = `${before}${inline(value)}${after}`;
	if (2 * depth + line.length <= width) return tabs + line;
	const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
	const inner = Array.isArray(value)
		? value.map((element: Value) => literal(element, "", ",", depth + 1))
		: Object.entries(value).map(([key, element]) => literal(element, `${key}: `, ",", depth + 1));
	return [`${tabs}${before}${open}`, ...inner, `${tabs}${close}${after}`].join("\n");
}

function inline(value: Value): string {
	if (typeof value !== "object") return JSON.stringify(value);
	if (Array.isArray(value)) return `[${value.map(inline).join(", ")}]`;
	const entries = Object.entries(value as { readonly [key: string]: Value });
	return `{ ${entries.map(([key, element]) => `${key}: ${inline(element)}`).join(", ")} }`;
}

/** An exported constant with a line for each entry that fits in one. */
function table(name: string, entries: Readonly<Record<string, Value | Signature>>, end: string): string {
	const lines = Object.entries(entries).map(([key, value]) => literal(value as Value, `${key}: `, ",", 1));
	return `export const ${name} = {\n${lines.join("\n")}\n} ${end};`;
}

/** Constants and enumerations of a header, with the names of an enumeration's members as a type. */
function namesOf({ constants, enums }: Header): string[] {
	return [
		...Object.entries(constants).map(([name, value]) => `export const ${name} = ${value};`),
		...Object.entries(enums).map(([name, members]) => {
			const type = pascalCase(name);
			const values = literal(memberNames(members), `export const ${type} = `, " as const;", 0);
			return `${values}\nexport type ${type}Name = keyof typeof ${type};`;
		}),
	];
}

/** The text of src/native/abi.ts. */
function abiText(headers: ReadonlyMap<string, Header>): string {
	const { structs, operations, functions } = wholeAbi(headers);
	return `${[
		`/**
 * Generated from cuda/include/mimo.h by cuda/include/tables.ts ("bun build.ts tables"); do not edit. Every constant, enumeration,
 * struct and function of the ABI in C names; the headers say what the names mean. Wrappers live in device.ts.
 */
import type { Fields, ScalarType } from "./structs.ts";`,
		[...headers.values()].flatMap(namesOf).join("\n"),
		`/** Structs the library fills in. */\n${table("structs", structs, "as const satisfies Record<string, Fields>")}`,
		`/** Argument structs: operation NAME is \`int32_t mimo_NAME(mimo_stream*, const mimo_NAME_args*)\`. */\n${table(
			"operations",
			operations,
			"as const satisfies Record<string, Record<string, ScalarType>>",
		)}\nexport type OperationName = keyof typeof operations;`,
		`/** Functions that are not operations: C argument types in order, and what they return. */\n${table("functions", functions, "as const")}`,
	].join("\n\n")}\n`;
}

/** The text of cuda/common/operations.def. */
function operationList(headers: ReadonlyMap<string, Header>): string {
	const lines = Object.keys(wholeAbi(headers).operations).map((name) => `MIMO_OPERATION(${name})`);
	return `// Generated from mimo.h ("bun build.ts tables"): every operation, from which the libraries export their symbols.\n${lines.join("\n")}\n`;
}

/** Every generated file: its path from the root, and its text. */
export function tables(headers = readHeaders()): ReadonlyMap<string, string> {
	return new Map([
		["src/native/abi.ts", abiText(headers)],
		["cuda/common/operations.def", operationList(headers)],
	]);
}
