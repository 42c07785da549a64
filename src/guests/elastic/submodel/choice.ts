/**
 * A submodel's sizes as a file says them, YAML or JSON: the configuration's keys of the elastic axes, each with a size for all layers or
 * a list with one for every layer of the kind, and the layers to leave out. An axis that is not named has the parent's size.
 */
import { type LayerKind, layerSymbols } from "../../../config/hybrid-pattern.ts";
import { nearestHint } from "../../../config/names.ts";
import type { HybridConfig } from "../../../models/language/config.ts";
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import { readYaml } from "../from-configuration.ts";
import { parentSubmodel, type Submodel } from "./submodel.ts";

type ListedAxis = "mambaNumHeads" | "moeFfnHiddenSize" | "numMoeExperts" | "numAttentionHeads";

/** Axes with a size a layer: the file's key, the submodel's field, and the layers that it sizes. */
const listed: readonly (readonly [key: string, axis: ListedAxis, kind: LayerKind])[] = [
	["mamba-num-heads", "mambaNumHeads", "mamba"],
	["num-attention-heads", "numAttentionHeads", "attention"],
	["num-experts", "numMoeExperts", "moe"],
	["moe-ffn-hidden-size", "moeFfnHiddenSize", "moe"],
];

const keys = ["hidden-size", ...listed.map(([key]) => key), "drop-layers"];

/** Reads the file and checks it against the parent. Throws a UserError that names file and key. */
export function readChoice(path: string, parent: HybridConfig): Submodel {
	return choiceOf(readYaml(path, `the choice ${path}`), parent, path);
}

/** The submodel of a choice's content. `path`: for errors. */
export function choiceOf(value: unknown, parent: HybridConfig, path: string): Submodel {
	const bad = (sentence: string): never => {
		throw new UserError(`${path}: ${sentence}.`);
	};
	if (typeof value !== "object" || value === null || Array.isArray(value)) {
		return bad(`a choice is a list of \`key: size\`, of ${keys.join(", ")}`);
	}
	const given = Object.fromEntries(Object.entries(value).map(([key, size]) => [key.replaceAll("_", "-"), size]));
	for (const key of Object.keys(given)) {
		if (!keys.includes(key)) bad(`there is no axis ${key}${nearestHint(key, keys)}; the axes are ${keys.join(", ")}`);
	}
	const whole = parentSubmodel(parent);
	const size = (key: string, one: unknown, most: number, divisor: number, of: string): number => {
		if (!Number.isSafeInteger(one) || (one as number) < 1)
			bad(`${key} is ${JSON.stringify(one)}; a size is a whole number from 1`);
		if ((one as number) > most) bad(`${key} is ${one}, larger than the parent's ${most}`);
		if ((one as number) % divisor !== 0) bad(`${key} is ${one}, no multiple of ${of} (${divisor})`);
		return one as number;
	};
	const hiddenSize =
		given["hidden-size"] === undefined
			? whole.hiddenSize
			: size("hidden-size", given["hidden-size"], whole.hiddenSize, 1, "");
	const sizes = Object.fromEntries(
		listed.map(([key, axis, kind]) => {
			const all = whole[axis];
			const said = given[key];
			if (said === undefined) return [axis, all];
			if (Array.isArray(said) && said.length !== all.length) {
				bad(
					`${key} has ${counted(said.length, "size")}, and the parent has ${counted(all.length, "layer")} ${layerSymbols[kind]}`,
				);
			}
			if (all.length === 0) bad(`${key} is given, and the parent has no layer ${layerSymbols[kind]}`);
			const [divisor, of] = divisorOf(axis, parent);
			return [axis, all.map((most, at) => size(key, Array.isArray(said) ? said[at] : said, most, divisor, of))];
		}),
	) as Record<ListedAxis, number[]>;
	const { topk, groups } = parent.moe;
	for (const [at, experts] of sizes.numMoeExperts.entries()) {
		if (experts < topk) bad(`num-experts is ${experts}, fewer than moe-router-topk (${topk})`);
		if (groups > 1 && experts < whole.numMoeExperts[at]!) {
			bad(`num-experts is ${experts}, and of experts in ${groups} groups (moe-router-num-groups) all are kept`);
		}
	}
	return { hiddenSize, ...sizes, keptLayers: keptLayers(given["drop-layers"], parent.pattern.length, bad) };
}

function divisorOf(axis: ListedAxis, { mamba, attention }: HybridConfig): readonly [divisor: number, of: string] {
	switch (axis) {
		case "mambaNumHeads":
			return [mamba.groups, "mamba-num-groups"];
		case "numAttentionHeads":
			return [attention.queryGroups, "num-query-groups"];
		default:
			return [1, ""];
	}
}

function keptLayers(dropped: unknown, layers: number, bad: (sentence: string) => never): boolean[] {
	const kept = Array.from({ length: layers }, () => true);
	if (dropped === undefined || dropped === null) return kept;
	const numbers = Array.isArray(dropped) ? dropped : [dropped];
	for (const number of numbers) {
		if (!Number.isSafeInteger(number) || (number as number) < 0 || (number as number) >= layers) {
			bad(`drop-layers has ${JSON.stringify(number)}; the parent's layers are 0 to ${layers - 1}`);
		}
		if (!kept[number as number]) bad(`drop-layers has ${number} twice`);
		kept[number as number] = false;
	}
	if (!kept.includes(true)) bad("drop-layers leaves no layer");
	return kept;
}

/** The shortest content of a file that reads as this submodel; {} for the parent itself. */
export function formatChoice(submodel: Submodel, parent: HybridConfig): Record<string, number | readonly number[]> {
	const whole = parentSubmodel(parent);
	const choice: Record<string, number | readonly number[]> = {};
	if (submodel.hiddenSize !== whole.hiddenSize) choice["hidden-size"] = submodel.hiddenSize;
	for (const [key, axis] of listed) {
		const sizes = submodel[axis];
		if (Bun.deepEquals(sizes, whole[axis])) continue;
		choice[key] = sizes.every((size) => size === sizes[0]) ? sizes[0]! : sizes;
	}
	const dropped = submodel.keptLayers.flatMap((kept, layer) => (kept ? [] : [layer]));
	if (dropped.length > 0) choice["drop-layers"] = dropped;
	return choice;
}
