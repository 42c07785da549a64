/** `mimo data prepare`: indexes a folder of tar files, a JSONL file or a metadataset, so that samples can be read singly. */
import { existsSync, statSync } from "node:fs";
import { defineCommand } from "citty";
import { claimFolder } from "../../checkpoint/index.ts";
import { defaultPrepareOptions, prepare } from "../../data/energon/prepare/prepare.ts";
import { warn } from "../../observe/messages.ts";
import { print } from "../../observe/output.ts";
import { counted } from "../../system/counted.ts";
import { datasetPath } from "../arguments.ts";

const args = {
	path: { type: "positional", required: true, description: "Folder of tar files, .jsonl file, or metadataset .yaml." },
	"split-ratio": { type: "string", description: "Shares of train, val and test, such as 8,1,1." },
	"split-parts": {
		type: "string",
		description: "Instead of a ratio: part:pattern of shard names, several separated by ;.",
	},
	exclude: { type: "string", description: "Leave out shards whose name matches this regular expression." },
	"shuffle-tars": { type: "boolean", description: "Shuffle the shards with a fixed seed before they are divided." },
	"tar-index-only": { type: "boolean", description: "Write the indexes again and nothing else." },
	"fix-duplicates": {
		type: "boolean",
		description: "Make keys distinct: move every shard's files into a folder, in place.",
	},
	"keep-cut-off": { type: "boolean", description: "Prepare what comes before the cut of a tar that ends early." },
	"force-overwrite": { type: "boolean", description: "Prepare a data set again that is prepared already." },
	"sample-type": { type: "string", description: "Type for dataset.yaml, such as CaptioningSample or CrudeWebdataset." },
	"field-map": {
		type: "string",
		description: 'JSON for dataset.yaml, such as {"image": "jpg,png", "caption": "txt"}.',
	},
	"dataset-yaml-name": { type: "string", default: "dataset.yaml", description: "Name of the dataset.yaml to write." },
} as const;

/** Every value of a flag that may be given several times. */
function repeated(rawArgs: readonly string[], flag: string): string[] {
	return rawArgs.flatMap((argument, i) => {
		if (argument.startsWith(`${flag}=`)) return [argument.slice(flag.length + 1)];
		return argument === flag && rawArgs[i + 1] !== undefined ? [rawArgs[i + 1]!] : [];
	});
}

export default defineCommand({
	meta: { name: "prepare", description: "Index a data set and divide it; Energon reads it too." },
	args,
	run: async ({ args: given, rawArgs }) => {
		const path = datasetPath(given.path);
		const isFolder = existsSync(path) && statSync(path).isDirectory();
		using _ = isFolder ? await claimFolder(path, "PATH", warn) : null;
		const prepared = prepare(path, {
			...defaultPrepareOptions,
			splitRatio: given["split-ratio"] ?? null,
			splitParts: repeated(rawArgs, "--split-parts"),
			exclude: given.exclude ?? null,
			shuffleTars: given["shuffle-tars"] ?? false,
			tarIndexOnly: given["tar-index-only"] ?? false,
			fixDuplicates: given["fix-duplicates"] ?? false,
			keepCutOff: given["keep-cut-off"] ?? false,
			forceOverwrite: given["force-overwrite"] ?? false,
			sampleType: given["sample-type"] ?? null,
			fieldMap: given["field-map"] ?? null,
			datasetYamlName: given["dataset-yaml-name"],
			report: (line) => process.stderr.write(`${line}\n`),
		});
		const parts = prepared.parts.length === 0 ? "" : `, parts ${prepared.parts.join(", ")}`;
		print(`${counted(prepared.samples, "sample")} in ${counted(prepared.shards, "shard")}${parts}`);
	},
});
