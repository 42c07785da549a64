/**
 * Reads the common state and the optimizer groups of a torch_dist checkpoint as JSON (docs/spec/checkpoint.md §1.7, §3.6).
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import type { Json } from "../native/manifest.ts";
import { openTorchFile } from "../pickle/archive.ts";
import { isJsonObject, type JsonObject, jsonOf } from "./common.ts";
import type { TorchDistFolder } from "./folder.ts";

/** Most chained optimizers of a module; Megatron chains two or three. */
const MOST_CHAINS = 64;

const commonItem = "common_state/shard_0_1";

/** The state in common.pt, which upstream prefers too, else in the byte item; {} without either. */
export function readCommon(folder: TorchDistFolder, inert: readonly string[]): JsonObject {
	const path = join(folder.path, "common.pt");
	let state: Json = {};
	if (existsSync(path)) {
		using file = openTorchFile(path, { inert, inside: folder.path });
		state = jsonOf(file.value, path);
	} else if (folder.objects.has(commonItem)) state = itemJson(folder, commonItem, inert);
	if (!isJsonObject(state)) throw new UserError(`The common state of ${folder.path} is not a dictionary.`);
	return state;
}

function itemJson(folder: TorchDistFolder, name: string, inert: readonly string[]): Json {
	return jsonOf(folder.readObject(name, { inert }), `${folder.path} (${name})`);
}

/** Parameter groups by module, a list for each chained optimizer, without the parameters. */
export function readParameterGroups(
	folder: TorchDistFolder,
	common: JsonObject,
	inert: readonly string[],
): Record<string, JsonObject[][]> {
	const groups = new Map<string, JsonObject[][]>();
	const add = (module: string, chain: number, value: Json | undefined) => {
		if (!Array.isArray(value)) return;
		if (chain > MOST_CHAINS)
			throw new UserError(`${folder.path}: module ${module} has optimizer ${chain}; at most ${MOST_CHAINS} are read.`);
		const chains = groups.get(module) ?? [];
		groups.set(module, chains);
		chains[chain] = value.filter(isJsonObject).map(({ params: _, ...group }) => group);
	};
	for (const name of folder.objects.keys()) {
		const item = /^mimo\.([^.]+)\.optimizer\.mimo\.[^.]+?(?:\.(\d+))?\.param_groups\/shard_0_1$/.exec(name);
		if (item) add(item[1]!, Number(item[2] ?? 0), itemJson(folder, name, inert));
		const buffers = /^(?:mimo\.([^.]+)\.)?(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer\//.exec(
			name,
		);
		if (buffers) {
			const state = itemJson(folder, name, inert);
			if (isJsonObject(state)) add(buffers[1] ?? "language", Number(buffers[2] ?? 0), state.param_groups);
		}
	}
	const plain = common.optimizer;
	if (isJsonObject(plain)) {
		const chains = isJsonObject(plain.optimizer) ? [plain] : Object.values(plain);
		chains.forEach((chain, index) => {
			if (isJsonObject(chain) && isJsonObject(chain.optimizer)) add("language", index, chain.optimizer.param_groups);
		});
	}
	return Object.fromEntries(groups);
}
