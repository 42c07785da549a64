/** The scripts of `mimo completion`, asked in the shells they are for. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { presetNames } from "../../src/config/keys/run.ts";
import { keys } from "../../src/config/schema.ts";
import { hasPrograms } from "../absent.ts";
import { mimo } from "./mimo.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-completion-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** How a shell is asked what it offers for the last of the words: a program that prints one offer a line. */
const shells = {
	bash: (script: string, words: readonly string[]) => [
		...[
			"-c",
			`source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mimo; printf "%s\\n" "\${COMPREPLY[@]}"`,
		],
		...["bash", script, ...words],
	],
	// Without a terminal its own functions cannot be called: these say what they are given.
	zsh: (script: string, words: readonly string[]) => [
		...[
			"-fc",
			`
			compdef() { :; }
			_files() { print -l -- *(N); }
			offer() { print -l -- \${(M)@:#$words[CURRENT]*}; }
			_describe() { [[ $1 == -o ]] && shift; local -a all=("\${(@P)2}"); offer \${all%%:*}; }
			compadd() { shift; offer "$@"; }
			source "$1"; shift; words=("$@"); CURRENT=$#; _mimo`,
		],
		...["zsh", script, ...words],
	],
	fish: (script: string, words: readonly string[]) => [
		...[
			"--no-config",
			"-c",
			'source $argv[1]; complete -C "$argv[2..]" | string replace -r "\\t.*" ""',
			script,
			...words,
		],
	],
} as const;

for (const [shell, argumentsFor] of Object.entries(shells)) {
	describe.skipIf(!hasPrograms([shell], shell))(shell, () => {
		const script = join(folder, shell);
		test("prints a script", () => {
			const { exitCode, stdout } = mimo(["completion", shell]);
			writeFileSync(script, stdout);
			expect(exitCode).toBe(0);
			expect(Bun.spawnSync([shell, "-n", script]).exitCode).toBe(0);
		});

		const offers = (...words: string[]) => {
			const { stdout, stderr } = Bun.spawnSync([shell, ...argumentsFor(script, ["mimo", ...words])], { cwd: folder });
			expect(stderr.toString()).toBe("");
			return [...new Set(stdout.toString().split("\n").filter(Boolean))].sort();
		};

		test("offers every command with the typed beginning", () => {
			const listed = [...mimo(["--help"]).stdout.matchAll(/^ {2}([a-z][\w-]+) /gm)].map(([, name]) => name!);
			expect(offers("")).toEqual(expect.arrayContaining(listed));
			expect(offers("do")).toEqual(["doctor"]);
			expect(offers("data", "prep")).toEqual(["prepare", "prepare-text"]);
		});

		test("offers flags of the command, and every key if the command takes a configuration", () => {
			expect(offers("train", "--")).toEqual(expect.arrayContaining(keys.map((key) => `--${key}`)));
			expect(offers("plan", "--gpus")).toEqual(["--gpus-per-host"]);
			expect(offers("train", "--gpus")).toEqual([]);
			expect(offers("data", "prepare", "--split-r")).toEqual(["--split-ratio"]);
			expect(offers("data", "preview", "--packing-b")).toEqual(["--packing-buffer-size"]);
		});

		test("offers values of a flag: names, or files", () => {
			const presets = presetNames.filter((name) => name.startsWith("nemotron-"));
			expect(offers("train", "--preset", "nemotron-")).toEqual(presets.sort());
			expect(offers("verify", "--device", "cu")).toEqual(["cuda"]);
			expect(offers("train", "--data-path", "")).toContain(shell);
		});
	});
}

test("every command's flags are known: those that are only read when it runs would be missing", () => {
	const { stdout } = mimo(["completion", "bash"]);
	const words = [...stdout.matchAll(/^ {4}'(mimo[\w -]*)'\) words='(.*)' ;;$/gm)].map(([, path, offered]) => [
		path!,
		offered!,
	]);
	expect(words.length).toBeGreaterThan(15);
	expect(words.filter(([, offered]) => offered === "--help").map(([path]) => path)).toEqual(
		["bash", "zsh", "fish"].map((shell) => `mimo completion ${shell}`),
	);
});

test("another shell is refused", () => {
	const { exitCode, stdout, stderr } = mimo(["completion", "fishy"]);
	expect([exitCode, stdout]).toEqual([2, ""]);
	expect(stderr).toBe("mimo: There is no command fishy; the nearest is fish. `mimo completion --help` lists all.\n");
});
