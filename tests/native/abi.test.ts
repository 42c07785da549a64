/**
 * src/native/abi.ts, its modules and operations.def are what the headers give, a C++ compiler agrees with them byte by byte, and
 * the library exports just that.
 */
import { describe, expect, test } from "bun:test";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { headerFiles, headerFolder, readHeaders, wholeAbi } from "../../cuda/include/header.ts";
import { tables } from "../../cuda/include/tables.ts";
import * as abi from "../../src/native/abi.ts";
import { openLibrary } from "../../src/native/library.ts";
import { type Fields, type FieldType, layoutOf } from "../../src/native/structs.ts";
import { buildTree } from "../sanitizer.ts";

const root = join(import.meta.dir, "../..");
const headers = readHeaders();
const header = wholeAbi(headers);
const headerText = headerFiles()
	.map(({ text }) => text)
	.join("\n");

/** Runs a program and returns its output. */
function output(command: string[], input = ""): string {
	const result = Bun.spawnSync(command, { stdin: Buffer.from(input), stdout: "pipe", stderr: "pipe" });
	if (!result.success) throw new Error(`${command.join(" ")} failed:\n${result.stderr}`);
	return result.stdout.toString();
}

/** Compiles a text behind a header; throws with the compiler's words. */
function compileWithHeader(program: string, language: "c" | "c++" = "c++", path = "mimo.h"): void {
	const standard = language === "c" ? "-std=c99" : "-std=c++20";
	const flags = [standard, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", `-I${headerFolder}`, "-x", language, "-"];
	output(["c++", ...flags], `#include "${path}"\n${program}`);
}

describe("the tables that are written from the headers", () => {
	test("are those in the tree", () => {
		const written = tables(headers);
		for (const [path, text] of written) expect(readFileSync(join(root, path), "utf8")).toBe(text);
	});

	test("change with a field, a value, an argument and an operation", () => {
		const before = tables(headers);
		/** Paths of the tables that a change of the headers changes. */
		const changed = (from: string, to: string): string[] => {
			expect(headerText).toContain(from);
			const files = headerFiles().map(({ path, text }) => ({ path, text: text.replaceAll(from, to) }));
			const after = tables(readHeaders(files));
			return [...after].flatMap(([path, text]) => (before.get(path) === text ? [] : [path])).toSorted();
		};
		expect(changed("  int64_t vocabulary_live;", "  int32_t vocabulary_live;")).toEqual(["src/native/abi.ts"]);
		expect(changed("MIMO_ERROR_DATA = 7", "MIMO_ERROR_DATA = 8")).toEqual(["src/native/abi.ts"]);
		expect(
			changed("int32_t mimo_memory_trim(mimo_device* device)", "int32_t mimo_memory_trim(int64_t device)"),
		).toEqual(["src/native/abi.ts"]);
		expect(changed("enum mimo_reduction", "enum mimo_reducing")).toEqual(["src/native/abi.ts"]);
		expect(changed("mimo_scale", "mimo_rescale")).toEqual(["cuda/common/operations.def", "src/native/abi.ts"]);
	});

	test("hold everything that the headers declare", () => {
		const { structs, functions, operations, enums } = header;
		expect(Object.keys({ ...functions, ...operations }).length).toBe(headerText.match(/^MIMO_API /gm)!.length);
		expect(Object.keys({ ...structs, ...operations }).length).toBe(
			headerText.match(/^typedef struct \w+ \{/gm)!.length,
		);
		expect(Object.keys(enums).length).toBe(headerText.match(/^enum /gm)!.length);
		const { structs: inTypescript, functions: called, operations: queued } = abi;
		expect([inTypescript, called, queued] as unknown[]).toEqual([structs, functions, operations]);
	});

	test("are refused from a declaration that C allows and the tables cannot say", () => {
		const added = (text: string) => () => readHeaders([...headerFiles(), { path: "mimo/a.h", text }]);
		expect(added("typedef struct mimo_a { uint16_t x; } mimo_a;")).toThrow('mimo/a.h: "uint16_t x" has a type without');
		expect(added("typedef struct mimo_a { int64_t x, y; } mimo_a;")).toThrow("is not read as a declaration");
		expect(added("typedef struct mimo_a_args { int64_t x; } mimo_a_args;")).toThrow("belongs to no operation");
		expect(added("enum mimo_a { MIMO_A_X };")).toThrow('mimo/a.h: enum mimo_a: "MIMO_A_X" has no written value');
		expect(added("MIMO_API int32_t mimo_a(int64_t);")).toThrow("is not read as a declaration");
	});
});

describe("mimo.h", () => {
	const umbrella = readFileSync(join(headerFolder, "mimo.h"), "utf8");

	test("says of each header which operations it declares", () => {
		const lists = umbrella.matchAll(/^#include "(mimo\/ops\/\w+\.h)"\s+\/\* (.*) \*\/$/gm);
		const beginnings = new Map([...lists].map(([, path, list]) => [path!, list!.split(", ")]));
		for (const [path, { operations }] of headers) {
			const names = Object.keys(operations);
			const said = beginnings.get(path) ?? [];
			const begins = (name: string, word: string) => `${name}_`.startsWith(`${word}_`);
			expect({ path, unsaid: names.filter((name) => !said.some((word) => begins(name, word))) }).toEqual({
				path,
				unsaid: [],
			});
			expect({ path, strange: said.filter((word) => !names.some((name) => begins(name, word))) }).toEqual({
				path,
				strange: [],
			});
		}
	});

	test("and its headers are C, each by itself", () => {
		for (const path of ["mimo.h", ...headers.keys()]) compileWithHeader("", "c", path);
	});
});

describe("a C++ compiler agrees with abi.ts on", () => {
	test("the place of every field", () => {
		const layouts: Record<string, Fields> = {
			...abi.structs,
			...Object.fromEntries(Object.entries(abi.operations).map(([name, fields]) => [`${name}_args`, fields])),
		};
		const assertions = Object.entries(layouts).flatMap(([name, fields]) => {
			const layout = layoutOf(fields);
			return [
				`static_assert(sizeof(mimo_${name}) == ${layout.bytes}, "mimo_${name}");`,
				...layout.fields.map(
					(field) =>
						`static_assert(offsetof(mimo_${name}, ${field.name}) == ${field.offset}, "mimo_${name}.${field.name}");`,
				),
			];
		});
		compileWithHeader(`#include <cstddef>\n${assertions.join("\n")}\n`);
	});

	test("every type and value", () => {
		const types: Record<string, string> = { i64: "int64_t", i32: "int32_t", f32: "float", f64: "double" };
		const is = (actual: string, type: FieldType | "cstring"): string =>
			type === "ptr"
				? `std::is_pointer_v<${actual}>`
				: type === "cstring"
					? `std::is_same_v<${actual}, const char*>`
					: typeof type === "string"
						? `std::is_same_v<${actual}, ${types[type]}>`
						: `std::is_same_v<${actual}, ${type[0] === "char" ? "char" : "int64_t"}[${type[1]}]>`;
		const fields = Object.entries({
			...abi.structs,
			...Object.fromEntries(Object.entries(abi.operations).map(([name, own]) => [`${name}_args`, own])),
		}).flatMap(([name, own]) =>
			Object.entries(own as Fields).map(
				([field, type]) => `static_assert(${is(`decltype(mimo_${name}::${field})`, type)}, "mimo_${name}.${field}");`,
			),
		);
		const signatures = Object.entries(abi.functions).flatMap(([name, { args, returns }]) => [
			`static_assert(std::tuple_size_v<Call<decltype(${name})>::Args> == ${args.length}, "${name}");`,
			`static_assert(${is(`Call<decltype(${name})>::Returns`, returns)}, "${name}");`,
			...args.map(
				(type, i) =>
					`static_assert(${is(`std::tuple_element_t<${i}, Call<decltype(${name})>::Args>`, type)}, "${name} ${i}");`,
			),
		]);
		const operations = Object.keys(abi.operations).map(
			(name) =>
				`static_assert(std::is_same_v<decltype(mimo_${name}), int32_t(mimo_stream*, const mimo_${name}_args*)>);`,
		);
		const constants = Object.entries(header.constants).map(([name, value]) => {
			expect(new Map<string, unknown>(Object.entries(abi)).get(name)).toBe(value);
			return `static_assert(MIMO_${name} == ${value});`;
		});
		const values = Object.values(header.enums).flatMap((members) =>
			Object.entries(members).map(([name, value]) => `static_assert(${name} == ${value});`),
		);
		compileWithHeader(`#include <cstdint>
#include <tuple>
#include <type_traits>
template <class F> struct Call;
template <class R, class... A> struct Call<R(A...)> { using Returns = R; using Args = std::tuple<A...>; };
${[...fields, ...signatures, ...operations, ...constants, ...values].join("\n")}
`);
	});

	test("members of enumerations by the names they have here", () => {
		expect(abi.Status).toEqual({
			ok: 0,
			argument: header.enums.status!.MIMO_ERROR_ARGUMENT!,
			outOfMemory: header.enums.status!.MIMO_ERROR_OUT_OF_MEMORY!,
			unsupported: header.enums.status!.MIMO_ERROR_UNSUPPORTED!,
			device: header.enums.status!.MIMO_ERROR_DEVICE!,
			internal: header.enums.status!.MIMO_ERROR_INTERNAL!,
			peer: header.enums.status!.MIMO_ERROR_PEER!,
			data: header.enums.status!.MIMO_ERROR_DATA!,
		} as unknown as typeof abi.Status);
		expect(Object.keys(abi.MemoryTag).length).toBe(header.enums.memory_tag!.MIMO_TAG_COUNT!);
		expect(abi.AttentionMask.causal).toBe(header.enums.attention_mask!.MIMO_ATTENTION_CAUSAL as 1);
	});
});

describe("the CPU library", () => {
	const wanted = [...Object.keys(abi.functions), ...Object.keys(abi.operations).map((name) => `mimo_${name}`)];

	test("exports every function of abi.ts and nothing else", async () => {
		const { source } = await openLibrary("cpu");
		const symbols = output(["nm", "-D", "--defined-only", source]).trim().split("\n");
		expect(symbols.map((line) => line.split(" ")[2]!).toSorted()).toEqual(wanted.toSorted());
	});

	test("code compiled for AVX-512 has no names of its own outside its namespace", () => {
		// The linker keeps one copy of a weak function: an AVX-512 one would end up on processors without it.
		const folder = join(buildTree(root), "cpu/CMakeFiles/kernels_avx512.dir/ops");
		if (!existsSync(folder)) {
			console.log(`skip: ${folder} is not there (another build made the library)`);
			return;
		}
		const objects = readdirSync(folder)
			.filter((file) => file.endsWith(".o"))
			.map((file) => join(folder, file));
		expect(objects.length).toBeGreaterThan(0);
		const weak = output(["nm", "-C", "--defined-only", ...objects])
			.split("\n")
			.filter((line) => / [WV] /.test(line) && !line.includes("avx512::") && !line.includes("DW.ref."));
		expect(weak).toEqual([]);
	});
});
