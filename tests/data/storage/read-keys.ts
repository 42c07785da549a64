/** Prints the restore keys of the first 30 outputs of a data set: `bun read-keys.ts PATH STORAGE-AS-JSON`. */
import { defaultLoaderConfiguration } from "../../../src/data/energon/loader/configuration.ts";
import { DataLoader } from "../../../src/data/energon/loader/loader.ts";
import type { StorageConfiguration } from "../../../src/data/energon/storage/open.ts";

/** Keys of the first 30 outputs, each as text. */
export async function readKeys(path: string, storage: StorageConfiguration): Promise<string[]> {
	const common = { ...defaultLoaderConfiguration, task: { kind: "decoded" } as const, shuffleBufferSize: 4 };
	await using loader = await DataLoader.open({ ...common, path, storage }, { threads: 2 });
	const found: string[] = [];
	while (found.length < 30) found.push(JSON.stringify((await loader.next())!.item.restoreKey));
	return found;
}

if (import.meta.main) {
	const keys = await readKeys(process.argv[2]!, JSON.parse(process.argv[3]!) as StorageConfiguration);
	console.log(JSON.stringify(keys));
	process.exit(0);
}
