/** The files by which Energon's own commands read an imported set: a typed dataset.yaml, and its sample loader in Python. */
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileError } from "../../system/system-errors.ts";
import { IMPORTED_LOADER, META_FOLDER } from "../energon/format/names.ts";
import loader from "./mimo_samples.py" with { type: "text" };

/** Writes the files into the set in `folder`; `settings`: keys of the configuration, under `mimo` among the subflavors. */
export function writeTypedConfig(folder: string, settings: Readonly<Record<string, string>>): void {
	const meta = join(folder, META_FOLDER);
	const subflavors = Object.entries(settings).map(([key, value]) => `    ${key}: ${value}\n`);
	const config = `sample_type:
  __module__: megatron.energon
  __class__: InterleavedSample
sample_loader: ${IMPORTED_LOADER}:sample_loader
part_filter: ${IMPORTED_LOADER}:part_filter
subflavors:
  mimo:
${subflavors.join("")}`;
	try {
		mkdirSync(meta, { recursive: true });
		writeFileSync(join(meta, IMPORTED_LOADER), loader);
		writeFileSync(join(meta, "dataset.yaml"), config);
	} catch (error) {
		throw fileError("write", meta, error);
	}
}
