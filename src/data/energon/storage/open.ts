/** Opens the storage of a path: local files, or remote files with their cache. */
import { defaultCacheFolder } from "../../../system/private-folder.ts";
import { LocalStorage } from "./local.ts";
import { RemoteStorage } from "./remote.ts";
import { isUrl, type RandomAccessFile, type RemoteOptions, type Storage } from "./storage.ts";

export interface StorageConfiguration extends Partial<Omit<RemoteOptions, "cacheFolder" | "cacheBytes">> {
	/** Parent of the folder of copies of remote data; null = the user's cache folder. */
	readonly cacheFolder: string | null;
	/** Most bytes of the disk cache; 0 = 16 GiB. */
	readonly cacheBytes: number;
}

/** Milliseconds. */
export const defaultTimeout = 60_000;

const defaults = {
	blockBytes: 1 << 20,
	readAhead: 2,
	attempts: 6,
	backoffMilliseconds: 250,
	stallMilliseconds: 20_000,
	timeoutMilliseconds: defaultTimeout,
	privateRedirects: false,
} as const;

export function openStorage({ cacheFolder, cacheBytes, ...rest }: StorageConfiguration): Storage {
	return new AnyStorage({
		...defaults,
		...rest,
		cacheFolder: cacheFolder ?? defaultCacheFolder(),
		cacheBytes: cacheBytes || 16 * 2 ** 30,
	});
}

/** Local and remote files by their path. */
class AnyStorage implements Storage {
	readonly #local = new LocalStorage();
	readonly #remote: RemoteStorage;

	constructor(options: RemoteOptions) {
		this.#remote = new RemoteStorage(options);
	}

	#of(path: string): Storage {
		return isUrl(path) ? this.#remote : this.#local;
	}

	open(path: string): RandomAccessFile {
		return this.#of(path).open(path);
	}

	readText(path: string): string {
		return this.#of(path).readText(path);
	}

	isFile(path: string): boolean {
		return this.#of(path).isFile(path);
	}

	isFolder(path: string): boolean {
		return this.#of(path).isFolder(path);
	}
}
