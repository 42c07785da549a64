/** src/native/abi.ts is mimo.h: name by name, argument by argument, byte by byte, and the library exports just that. */
import { describe, expect, test } from "bun:test";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import * as abi from "../../src/native/abi.ts";
import { openLibrary } from "../../src/native/library.ts";
import { layoutOf } from "../../src/native/structs.ts";
import { buildTree } from "../sanitizer.ts";
import { abiType, headerFolder, headerNames, headerText, readHeader } from "./header.ts";

const root = join(import.meta.dir, "../..");
const header = readHeader();

function camelCase(name: string): string {
	return name.toLowerCase().replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
}

/** MIMO_ERROR_OUT_OF_MEMORY → outOfMemory: what follows the words all members share, and "error". */
function memberNames(members: Readonly<Record<string, number>>): Record<string, number> {
	const words = Object.keys(members).map((name) => name.split("_"));
	let shared = 0;
	while (words.every((w) => w[shared] === words[0]![shared] && shared < w.length - 1)) shared++;
	return Object.fromEntries(
		Object.values(members).map((value, i) => {
			const own = words[i]!.slice(shared);
			return [camelCase((own[0] === "ERROR" ? own.slice(1) : own).join("_")), value];
		}),
	);
}

/** Runs a program and returns what it printed. */
function output(command: string[], input = ""): string {
	const result = Bun.spawnSync(command, { stdin: Buffer.from(input), stdout: "pipe", stderr: "pipe" });
	if (!result.success) throw new Error(`${command.join(" ")} failed:\n${result.stderr}`);
	return result.stdout.toString();
}

describe("mimo.h", () => {
	test("has the version abi.ts asks for", () => {
		expect(header.version).toBe(abi.ABI_VERSION);
	});

	test("was read whole", () => {
		const text = headerText();
		expect(Object.keys(header.functions).length).toBe(text.match(/^MIMO_API /gm)!.length);
		expect(Object.keys(header.structs).length).toBe(text.match(/^typedef struct \w+ \{/gm)!.length);
		expect(Object.keys(header.enums).length).toBe(text.match(/^enum /gm)!.length);
	});

	for (const [name, members] of Object.entries(header.enums)) {
		test(`enum mimo_${name}`, () => {
			const { count, ...named } = memberNames(members);
			const exported = new Map<string, unknown>(Object.entries(abi));
			expect(exported.get(camelCase(`_${name}`))).toEqual(named);
			if (count !== undefined) expect(count).toBe(Object.keys(named).length);
		});
	}

	test("every operation takes a stream and its arguments", () => {
		for (const name of Object.keys(abi.operations)) {
			expect([name, header.functions[`mimo_${name}`]]).toEqual([
				name,
				{ args: ["mimo_stream*", `const mimo_${name}_args*`], returns: "int32_t" },
			]);
		}
	});

	test("every other function has the arguments of abi.ts", () => {
		const isOperation = (name: string) => header.functions[name]!.args[1] === `const ${name}_args*`;
		const others = Object.entries(header.functions).filter(([name]) => !isOperation(name));
		const spelled = others.map(([name, { args, returns }]) => [
			name,
			{ args: args.map(abiType), returns: returns === "const char*" ? "cstring" : abiType(returns) },
		]);
		expect(Object.fromEntries(spelled)).toEqual(abi.functions as unknown as Record<string, object>);
		expect(
			Object.keys(abi.operations)
				.map((name) => `mimo_${name}`)
				.toSorted(),
		).toEqual(Object.keys(header.functions).filter(isOperation).toSorted());
	});

	test("every struct has the fields of abi.ts, in order", () => {
		const expected = {
			...Object.fromEntries(Object.entries(abi.structs).map(([name, fields]) => [`mimo_${name}`, fields])),
			...Object.fromEntries(Object.entries(abi.operations).map(([name, fields]) => [`mimo_${name}_args`, fields])),
		};
		expect(Object.keys(header.structs).toSorted()).toEqual(Object.keys(expected).toSorted());
		for (const [name, fields] of Object.entries(expected)) {
			expect([name, header.structs[name]]).toEqual([name, Object.entries(fields)]);
		}
	});

	test("the libraries' list of operations names each once", () => {
		const list = readFileSync(join(root, "cuda/common/operations.def"), "utf8");
		const names = [...list.matchAll(/^MIMO_OPERATION\((\w+)\)$/gm)].map((match) => match[1]!);
		expect(names.toSorted()).toEqual(Object.keys(abi.operations).toSorted());
	});

	test("a C++ compiler places every field where structs.ts does", () => {
		const layouts: Record<string, abi.Fields> = {
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
		const program = `#include <cstddef>\n#include "mimo.h"\n${assertions.join("\n")}\n`;
		output(["c++", "-std=c++20", "-fsyntax-only", `-I${headerFolder}`, "-x", "c++", "-"], program);
	});

	test("is C as well", () => {
		const flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"];
		output(
			["c++", "-x", "c", ...flags, `-I${headerFolder}`, "-"],
			headerNames.map((name) => `#include "${name}"\n`).join(""),
		);
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
