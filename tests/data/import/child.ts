/** An import that kills itself: `bun child.ts SOURCE OUTPUT OPTIONS N`, with N the number of images until it dies. */
import { type ImportOptions, importData } from "../../../src/data/import/import.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { importDefaults } from "./importing.ts";

const [path, output, json, count] = process.argv.slice(2) as [string, string, string, string];
let left = Number(count);

class DeadlyImages extends Images {
	override inspect(file: Uint8Array) {
		if (left-- === 0) process.kill(process.pid, "SIGKILL");
		return super.inspect(file);
	}
}

const options = { ...importDefaults, ...(JSON.parse(json) as Partial<ImportOptions>), paths: [path], output };
await importData(options, new DeadlyImages(await openLibrary("cpu")));
