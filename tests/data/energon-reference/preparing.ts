/** Repeats the `energon prepare` commands of the reference data on copies and compares the files they leave. */
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { OffsetIndex } from "../../../src/data/energon/format/jsonl.ts";
import { defaultPrepareOptions, type PrepareOptions, prepare } from "../../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import { UserError } from "../../../src/system/errors.ts";
import { difference } from "./golden.ts";
import type { Setting } from "./setup.ts";

export interface PrepareCase {
	readonly command: string;
	readonly exit_code: number;
	readonly files_left: readonly string[];
	readonly content: Readonly<Record<string, string>>;
	readonly tar_index: Readonly<Record<string, readonly number[]>>;
}

/** The words of a command; JSON in braces is one word. */
function words(command: string): string[] {
	return command.match(/\{.*\}|\S+/g) ?? [];
}

function optionsOf(command: string): { path: string; options: PrepareOptions } {
	const options: { -readonly [name in keyof PrepareOptions]: PrepareOptions[name] } = {
		...defaultPrepareOptions,
		keepCutOff: true,
	};
	const [, , ...rest] = words(command);
	let path = "";
	for (let i = 0; i < rest.length; i++) {
		const flag = rest[i]!;
		if (!flag.startsWith("--")) path = flag;
		else if (flag === "--split-ratio") options.splitRatio = rest[++i]!;
		else if (flag === "--split-parts") options.splitParts = [...options.splitParts, rest[++i]!];
		else if (flag === "--exclude") options.exclude = rest[++i]!;
		else if (flag === "--sample-type") options.sampleType = rest[++i]!;
		else if (flag === "--field-map") options.fieldMap = rest[++i]!;
		else if (flag === "--num-workers") i++;
		else if (flag === "--shuffle-tars") options.shuffleTars = true;
		else if (flag === "--force-overwrite") options.forceOverwrite = true;
		else if (flag === "--tar-index-only") options.tarIndexOnly = true;
		else if (flag === "--fix-duplicates") options.fixDuplicates = true;
		else if (flag !== "--non-interactive" && flag !== "--no-progress") {
			throw new UserError(`The reference data use the flag ${flag} of energon prepare, which is not known here.`);
		}
	}
	return { path, options };
}

/** Where the reference is refused or leaves nothing, nothing usable may be left; elsewhere the files must be equal. */
export function comparePreparation({ golden }: Setting, entry: PrepareCase): string | null {
	const { path, options } = optionsOf(entry.command);
	const scratch = mkdtempSync(join(tmpdir(), "mimo-prepare-"));
	try {
		const isFile = path.endsWith(".jsonl");
		const copy = join(scratch, basename(path));
		mkdirSync(dirname(copy), { recursive: true });
		cpSync(join(golden, path), copy, { recursive: true });
		makeWritable(scratch);
		let refused: string | null = null;
		try {
			prepare(copy, options);
		} catch (error) {
			if (!(error instanceof UserError)) throw error;
			refused = error.message;
		}
		const folder = isFile ? scratch : copy;
		// Prepared anew: a command that finds nothing to do also ends well.
		const done = isFile ? `${basename(path)}.idx` : ".nv-meta/.info.json";
		const wanted = entry.exit_code === 0 && entry.files_left.includes(done);
		if (!wanted) return refused === null ? "it was prepared, but Energon prepares nothing" : null;
		if (refused !== null) return refused;
		return leftDifference(folder, entry);
	} finally {
		rmSync(scratch, { recursive: true, force: true });
	}
}

function makeWritable(folder: string): void {
	Bun.spawnSync(["chmod", "-R", "u+w", folder]);
}

function leftDifference(folder: string, entry: PrepareCase): string | null {
	const left = readdirSync(folder, { recursive: true, withFileTypes: true })
		.filter((file) => file.isFile())
		.map((file) => join(file.parentPath, file.name).slice(folder.length + 1))
		.filter((name) => !name.endsWith(".tar"))
		.sort();
	const files = difference(left, [...entry.files_left].sort(), "files");
	if (files !== null) return files;
	for (const [name, expected] of Object.entries(entry.content)) {
		const text = readFileSync(join(folder, ".nv-meta", name), "utf8");
		const found =
			name === ".info.json"
				? difference(JSON.parse(text).shard_counts, JSON.parse(expected).shard_counts, "shard_counts")
				: difference(text, expected, name);
		if (found !== null) return found;
	}
	for (const [name, expected] of Object.entries(entry.tar_index)) {
		if (!existsSync(join(folder, name))) return `${name} is absent`;
		const index = OffsetIndex.open(new LocalStorage(), join(folder, name));
		const entries = Array.from({ length: index.length }, (_, i) => index.at(i));
		const found = difference(entries, expected, name);
		if (found !== null) return found;
	}
	return null;
}
