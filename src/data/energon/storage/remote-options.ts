/** How remote files are fetched. Plain values, so that they reach other threads. */
export interface RemoteOptions {
	/** Folder that the disk cache's own one lies in; the processes of a user on a host share it. */
	readonly cacheFolder: string;
	/** Most bytes of the disk cache. */
	readonly cacheBytes: number;
	/** Bytes fetched at once. */
	readonly blockBytes: number;
	/** Blocks fetched ahead of the one that is read. */
	readonly readAhead: number;
	/** Tries before a read fails, and the pause after the first, doubled after each. */
	readonly attempts: number;
	readonly backoffMilliseconds: number;
	/** A connection without news for this long is given up. */
	readonly stallMilliseconds: number;
}

/** Identifies the version of a file when it was opened. */
export interface RemoteVersion {
	readonly url: string;
	readonly size: number;
	/** The server's tag of this version, or when it was last changed; null where it gives neither. */
	readonly etag: string | null;
	/** Tells the versions of a file in the cache apart: the tag, or a name that only this run knows. */
	readonly cacheName: string;
}
