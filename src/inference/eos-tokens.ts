/** The end-of-sequence tokens of a Hugging Face model: eos_token_id of generation_config.json and config.json. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { parsePythonJson } from "../checkpoint/index.ts";
import { configLimits, readJsonText } from "../system/json.ts";

export function endIdsOfFolder(path: string): number[] {
	const ids = ["generation_config.json", "config.json"].flatMap((name) => {
		const file = join(path, name);
		if (!existsSync(file)) return [];
		const { eos_token_id: given } = parsePythonJson(readJsonText(file, configLimits, { inside: path }), file);
		return [given].flat().filter((id): id is number => Number.isSafeInteger(id));
	});
	return [...new Set(ids)];
}
