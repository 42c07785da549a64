/** `mimo data info`: describes a data set. */
import { defineCommand } from "citty";
import type { DatasetDescription } from "../../data/energon/tools/describe.ts";
import { print } from "../../observe/output.ts";
import { shownAddress } from "../../system/addresses.ts";
import { counted } from "../../system/counted.ts";
import { datasetPath, pathArgument, redirectsFlag } from "../arguments.ts";

const args = {
	path: pathArgument,
	json: { type: "boolean", description: "Print the description as JSON." },
	[redirectsFlag]: { type: "boolean", description: "As of mimo train." },
} as const;

export default defineCommand({
	meta: { name: "info", description: "Show parts, shards, samples and types of a data set." },
	args,
	run: async ({ args: given }) => {
		const { describeDataset } = await import("../../data/energon/tools/describe.ts");
		const { openStorage } = await import("../../data/energon/storage/open.ts");
		const storage = openStorage({ cacheFolder: null, cacheBytes: 0, privateRedirects: given[redirectsFlag] ?? false });
		const description = describeDataset(storage, datasetPath(given.path));
		print(shownAddress(given.json ? JSON.stringify(description, null, 2) : render(description)));
	},
});

function render(set: DatasetDescription): string {
	const lines = [`${set.path}: ${kinds[set.kind]}, ${counted(set.samples, "sample")}`];
	if (set.kind !== "metadataset") {
		lines.push(`  ${counted(set.shards, "shard")}, ${size(set.bytes)}, samples ${set.sampleType ?? ""}`);
	}
	for (const [field, source] of Object.entries(set.fields)) lines.push(`    ${field} from ${source}`);
	for (const { part, shards, samples, excluded } of set.parts) {
		const left = excluded > 0 ? `, ${excluded} excluded` : "";
		lines.push(`  ${part}: ${counted(shards, "shard")}, ${counted(samples, "sample")}${left}`);
	}
	for (const leaf of set.leaves) {
		const share = leaf.weight === null ? null : `weight ${leaf.weight.toPrecision(4)}`;
		const times = leaf.repetitions === null ? null : counted(leaf.repetitions, "time");
		const all = counted(leaf.samples, "sample");
		const samples = leaf.used === leaf.samples ? all : `${leaf.used} of ${all}`;
		const flavors = Object.keys(leaf.subflavors).length > 0 ? JSON.stringify(leaf.subflavors) : null;
		const details = [samples, share, times, flavors].filter((text) => text !== null);
		lines.push(`  ${leaf.part}: ${leaf.path} (${leaf.splitPart}), ${details.join(", ")}`);
	}
	if (set.kind === "webdataset" && !set.hasKeyIndex) lines.push("  no index by key, which joins need");
	return lines.join("\n");
}

const kinds = {
	webdataset: "WebDataset",
	jsonl: "JSONL file",
	indexed: "indexed text",
	metadataset: "metadataset",
} as const;

function size(bytes: number): string {
	const units = ["bytes", "kB", "MB", "GB", "TB"];
	const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, bytes)) / 3)));
	return `${power === 0 ? bytes : (bytes / 1000 ** power).toFixed(1)} ${units[power]}`;
}
