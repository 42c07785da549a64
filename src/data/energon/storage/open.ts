/** Opens the storage a path lies in: local files, or remote ones with their cache. */
import { LocalStorage } from "./local.ts";
import type { Storage } from "./storage.ts";

export interface StorageConfiguration {
	/** Folder of the disk cache for remote data; null = a folder of the system's for temporary files. */
	readonly cacheFolder: string | null;
	/** Most bytes of the disk cache; 0 = 16 GiB. */
	readonly cacheBytes: number;
}

export function openStorage(_configuration: StorageConfiguration): Storage {
	return new LocalStorage();
}
