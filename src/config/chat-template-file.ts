/** The file with a tokenizer's chat template. */
import { existsSync, statSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { readJsonText, tokenizerLimits } from "../system/json.ts";

/** Files of a folder that may hold its template, the first that does counts. */
const templateFiles = ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"] as const;

/**
 * The file with the template of a tokenizer's folder, which its tokenizer.json may name; null: it has none. A file that cannot be
 * read counts, so that its reader says what is wrong with it.
 */
export function chatTemplateFile(tokenizer: string): string | null {
	const folder = basename(tokenizer) === "tokenizer.json" ? dirname(tokenizer) : tokenizer;
	if (!existsSync(folder) || !statSync(folder).isDirectory()) return null;
	const files = templateFiles.map((name) => join(folder, name)).filter((file) => existsSync(file));
	return files.find((file) => !file.endsWith(".json") || mayHoldTemplate(file, folder)) ?? null;
}

function mayHoldTemplate(file: string, folder: string): boolean {
	try {
		return (JSON.parse(readJsonText(file, tokenizerLimits, { inside: folder })).chat_template ?? null) !== null;
	} catch {
		return true;
	}
}
