/** Files of a Hugging Face folder beside weights and config.json: tokenizer, preprocessor, templates, code. */
import { existsSync, readdirSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { readWholeFile } from "../../system/input-file.ts";
import { type Durability, OutputFile } from "../files.ts";

/** Bytes of all of a folder's; a tokenizer has some ten million. */
const LARGEST_COMPANIONS = 2 ** 28;

const tokenizerFiles = /^(tokenizer.*|special_tokens_map\.json|vocab\.(json|txt)|merges\.txt|chat_template\..*)$/;
const preprocessorFiles = /^(preprocessor_config\.json|processor_config\.json|video_preprocessor_config\.json)$/;
const otherFiles = /^(generation_config\.json|.*\.py|LICENSE.*)$/;

export type Companions = ReadonlyMap<string, Uint8Array>;

/** Files that are passed on as they are: what a link leads to, out of the folder, is not of the model. */
function readFiles(folder: string, wanted: (name: string) => boolean): Companions {
	const isFolder = (name: string) => statSync(join(folder, name), { throwIfNoEntry: false })?.isDirectory() ?? false;
	const files = new Map<string, Uint8Array>();
	let room = LARGEST_COMPANIONS;
	for (const name of readdirSync(folder).sort()) {
		if (!wanted(name) || isFolder(name)) continue;
		const bytes = readWholeFile(join(folder, name), room, { inside: folder });
		room -= bytes.byteLength;
		files.set(name, bytes);
	}
	return files;
}

/** All of a folder's; never weights. */
export function companionsOf(folder: string): Companions {
	return readFiles(folder, (name) => [tokenizerFiles, preprocessorFiles, otherFiles].some((files) => files.test(name)));
}

/** Files of a vision tower's folder that a vision-language model needs too. */
export function preprocessorOf(folder: string): Companions {
	return readFiles(folder, (name) => preprocessorFiles.test(name));
}

/** The files of a tokenizer, which is named by its folder or by its tokenizer.json; its own name in the latter case. */
export function tokenizerOf(path: string): Companions {
	if (!existsSync(path)) return new Map();
	if (statSync(path).isDirectory()) return readFiles(path, (name) => tokenizerFiles.test(name));
	const beside = readFiles(dirname(path), (name) => tokenizerFiles.test(name));
	return new Map([...beside, ["tokenizer.json", readWholeFile(path, LARGEST_COMPANIONS)]]);
}

/** All but a tokenizer's. */
export function withoutTokenizer(companions: Companions): Companions {
	return new Map([...companions].filter(([name]) => !tokenizerFiles.test(name)));
}

/** Writes them into a folder. */
export function writeCompanions(folder: string, companions: Companions, durability: Durability): void {
	for (const [name, bytes] of companions) {
		using file = new OutputFile(join(folder, name), durability);
		file.write(bytes);
		file.close();
	}
}
