/**
 * Names of files in a dataset: the grouping of members into samples (docs/spec/energon.md §1.2), and the paths of metadata.
 */

export const META_FOLDER = ".nv-meta";
export const INFO_JSON = ".info.json";
export const INFO_YAML = ".info.yaml";
/** Energon's sample loader in a set of `mimo data import`, whose parts mimo reads without it. */
export const IMPORTED_LOADER = "mimo_samples.py";
export const INDEX_SQLITE = "index.sqlite";
export const INDEX_UUID = "index.uuid";

const memberName = /^((?:.*\/|)[^.]+)[.]([^/]*)$/s;
const metaName = /^__[^/]*__(?:$|\/)/;

/** Sample key and extension of a member; null when the member belongs to no sample. */
export function splitMemberName(name: string): { base: string; extension: string } | null {
	if (metaName.test(name)) return null;
	const match = memberName.exec(name);
	return match ? { base: match[1]!, extension: match[2]! } : null;
}

/** `shard.tar` → `shard.tar.idx`, `a.tgz` → `a.tar.idx`. */
export function tarIndexName(tar: string): string {
	return `${tar.replace(/\.[^./]*$/, "")}.tar.idx`;
}

/** `facts.jsonl` → `facts.jsonl.idx`. */
export function jsonlIndexName(jsonl: string): string {
	return `${jsonl.replace(/\.[^./]*$/, "")}.jsonl.idx`;
}

/** Compares paths as Python does: component by component. */
export function byPathParts(a: string, b: string): number {
	const [left, right] = [a.split("/"), b.split("/")];
	for (let i = 0; i < Math.min(left.length, right.length); i++) {
		if (left[i] !== right[i]) return left[i]! < right[i]! ? -1 : 1;
	}
	return left.length - right.length;
}
